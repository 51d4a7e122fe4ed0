"""A server's side of a transfer: the manifest of its model, and copying weights into it."""

import torch
from torch import Tensor, nn

from turnwise.transfer.contracts import WeightSource
from turnwise.transfer.live import spec_of
from turnwise.transfer.manifest import WeightManifest


def manifest_of_model(model: nn.Module) -> WeightManifest:
    """All parameters of a model under all their names. The model may be on the meta device, where tensors
    have no addresses."""
    parameters = _all_names(model)
    names: dict[int, list[str]] = {}
    for name, parameter in parameters.items():
        names.setdefault(id(parameter), []).append(name)
    tied = tuple(tuple(group) for group in names.values() if len(group) > 1)
    return WeightManifest({name: spec_of(parameter) for name, parameter in parameters.items()}, tied)


def copy_into(model: nn.Module, weights: WeightSource) -> int:
    """Copies weights that fit a model into its parameters, in place, and returns the number of bytes
    written."""
    targets = _all_names(model)
    num_bytes = 0
    with torch.no_grad():
        for name, tensor in weights:
            targets[name].copy_(tensor)
            num_bytes += targets[name].nbytes
    return num_bytes


def _all_names(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters(remove_duplicate=False))
