"""Saves and loads a strategy's weights and training state, so that training continues bit for bit."""

import json
import random
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from turnwise.errors import ModelError, listed
from turnwise.model_files.folder import ADAPTER_CONFIG
from turnwise.models.file_tensors import require_weights
from turnwise.models.load import load_model_config, load_pretrained, trusted_already
from turnwise.models.lora import Gathered
from turnwise.models.shares import Shares
from turnwise.runtime.disk import writing
from turnwise.training.optimizer import LossScale

TRAINER_FILE = "trainer_state.pt"
"""Written with whole tensors."""
SHARED_STATE_FILE = "trainer_state.json"
"""Written with shares, which have the moments."""
_PARTS = {"optimizer", "random", "cuda_rng"}
CPU = torch.device("cpu")


def trainer_state(loss_scale: LossScale, device: torch.device = CPU) -> dict[str, Any]:
    """The states of the loss scale and of the random generators: those of the CPU, and that of `device` if it
    is a GPU."""
    device_states = []
    if device.type == "cuda":
        device_states.append(torch.cuda.get_rng_state(device))
    return {
        "loss_scale": loss_scale.state_dict(),
        "random": GlobalRandomState().state_dict(),
        "cuda_rng": device_states,
    }


def write_trainer_state(folder: Path, state: Mapping[str, Any], optimizer: Mapping[str, Any] | None) -> None:
    """Writes a `trainer_state` with the state of AdamW, None for a frozen model. Raises OSError if it can't
    be written."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / TRAINER_FILE
    with writing(file):
        try:
            torch.save({"optimizer": optimizer, **state}, file)
        except RecursionError:  # a RuntimeError that says nothing about the disk
            raise
        except RuntimeError as fault:
            raise OSError(f"{file}: {fault}") from fault


def write_shared_state(folder: Path, state: Mapping[str, Any], steps: Mapping[str, float] | None) -> None:
    """Writes a `trainer_state` beside shares, with the number of steps that AdamW has made of each parameter,
    None for a frozen model. Raises OSError if it can't be written."""
    generators = [generator.numpy().tobytes().hex() for generator in state["cuda_rng"]]
    values = {**state, "cuda_rng": generators, "optimizer": None if steps is None else {"steps": steps}}
    (folder / SHARED_STATE_FILE).write_text(json.dumps(values) + "\n", encoding="utf-8")


def read_shared_state(folder: Path) -> dict[str, Any]:
    """What `write_shared_state` wrote into a folder. Raises ModelError if it can't be read."""
    file = folder / SHARED_STATE_FILE
    try:
        state: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if not state.keys() >= _PARTS:
            raise ValueError("it has other parts")
        generators = [
            torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8) for text in state["cuda_rng"]
        ]
        if state["optimizer"] is not None:
            state["optimizer"]["steps"] = {
                str(name): float(number) for name, number in state["optimizer"]["steps"].items()
            }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(
            f"{file} isn't a training state that turnwise wrote ({error}); continue from another checkpoint"
        ) from error
    return {**state, "cuda_rng": generators}


def restore_trainer_state(
    state: Mapping[str, Any], loss_scale: LossScale, device: torch.device = CPU
) -> None:
    """Continues with the loss scale and the random states of a `trainer_state`."""
    loss_scale.load_state_dict(state.get("loss_scale", {}))
    GlobalRandomState().load_state_dict(state["random"])
    if device.type == "cuda" and len(state["cuda_rng"]) == 1:
        torch.cuda.set_rng_state(state["cuda_rng"][0], device)


def load_moments(optimizer: Optimizer, state: dict[int, Any]) -> None:
    """Loads only the moments: learning rate, betas and weight decay come from this run's settings, which may
    have changed."""
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def read_trainer_state(folder: Path) -> dict[str, Any]:
    """What `write_trainer_state` wrote into a folder. Raises ModelError if there is nothing, or another
    program wrote it."""
    file = folder / TRAINER_FILE
    if not file.is_file():
        raise ModelError(
            f"{folder} holds no training state ({TRAINER_FILE}); `pretrain` loads plain model folders"
        )
    return load_trainer_state(file)


def load_trainer_state(file: Path, is_mapped: bool = False) -> dict[str, Any]:
    """The contents of a `TRAINER_FILE`. `is_mapped` memory-maps it. Raises ModelError if another program
    wrote it."""
    try:
        state: dict[str, Any] = torch.load(
            file,
            map_location="cpu",
            weights_only=True,
            mmap=is_mapped,
        )
        if not state.keys() >= _PARTS:
            raise ValueError("it has other parts")
    except (
        OSError,
        ValueError,
        EOFError,
        RuntimeError,
        LookupError,
        AttributeError,
        TypeError,
        UnpicklingError,
    ) as error:
        raise ModelError(
            f"{file} isn't a training state that turnwise wrote, so nothing in it is run; it is damaged, or "
            "another program wrote it: continue from another checkpoint"
        ) from error
    return state


Copy = Callable[[Tensor, Tensor], Any]
"""Copies into a live tensor, of which this rank may hold a share, the values of a whole one."""


def read_model_weights(
    folder: Path,
    model: PreTrainedModel,
    gathered: Gathered = nullcontext,
    copy: Copy = Tensor.copy_,
) -> None:
    """Copies the weights of a Hugging Face folder into the live parameters of a model, by `copy` inside
    `gathered(…)`. Raises ModelError if they are adapters, or have other names or shapes."""
    if (folder / ADAPTER_CONFIG).is_file():
        raise ModelError(
            f"{folder} holds LoRA adapters, not all parameters; set lora_rank as it was to continue with it"
        )
    trust = trusted_already(model)
    config = load_model_config(folder, trust)
    saved, missing, unexpected = load_pretrained(
        type(model),
        folder,
        config,
        dtype=model.dtype,
        trust=trust,
    )
    require_weights(folder, missing, unexpected)
    copy_weights(saved, model, gathered, copy)


@torch.no_grad()
def copy_shares(shares: Shares, model: PreTrainedModel, gathered: Gathered = nullcontext) -> None:
    """Copies the weights of shares into the live parameters of a model, inside `gathered(…)`, one
    whole tensor at a time. Raises ModelError if the shares hold other tensors."""
    shapes: dict[str, torch.Size] = {}
    for name, tensor in saved_tensors(model):
        with gathered([tensor]):
            shapes[name] = tensor.shape
            tensor.copy_(shares.whole(name, tensor.shape))
    require_same_tensors(shares, shapes)


def require_same_tensors(shares: Shares, names: Collection[str]) -> None:
    """Raises ModelError if shares hold a weight that the model doesn't have."""
    unknown = [name for name in shares.weights if name not in names]
    if unknown:
        raise ModelError(
            f"{shares.folder}: the shares hold {listed(unknown)}, which this model doesn't have: it was "
            "saved from another model; set pretrain as it was"
        )


def saved_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a model's folder holds: parameters, tied ones once, and persistent buffers."""
    yield from model.named_parameters()
    persistent = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in persistent:
            yield name, buffer


@torch.no_grad()
def copy_weights(
    source: PreTrainedModel,
    target: PreTrainedModel,
    gathered: Gathered = nullcontext,
    copy: Copy = Tensor.copy_,
) -> None:
    """Copies parameters and persistent buffers to `target`. Raises ModelError if `source` lacks a tensor or a
    shape differs."""
    saved = source.state_dict()
    for name, tensor in target.state_dict(keep_vars=True).items():
        with gathered([tensor]):
            if name not in saved or saved[name].shape != tensor.shape:
                shape = tuple(tensor.shape)
                raise ModelError(
                    f"the saved model has no tensor {name} of shape {shape}; it is another architecture"
                )
            copy(tensor, saved[name])


class GlobalRandomState:
    """The state of the global generators of `random`, `numpy.random` and torch (on the CPU), which user code
    may draw from."""

    def state_dict(self) -> dict[str, Any]:
        version, words, gauss = random.getstate()
        name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        return {
            "python": [version, list(words), gauss],
            "numpy": [name, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
            "torch": torch.get_rng_state().numpy().tobytes().hex(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        name, keys, *position_and_gauss = state["numpy"]
        words_of_numpy = np.array(keys, dtype=np.uint32)
        np.random.set_state((name, words_of_numpy, *position_and_gauss))
        bytes_of_torch = bytearray.fromhex(state["torch"])
        torch.set_rng_state(torch.frombuffer(bytes_of_torch, dtype=torch.uint8))
