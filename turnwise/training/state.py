"""Saves and loads a strategy's weights and training state, so that training continues bit for bit."""

import random
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from turnwise.errors import ModelError
from turnwise.model_files.folder import ADAPTER_CONFIG
from turnwise.models.file_tensors import require_weights
from turnwise.models.load import load_model_config, load_pretrained, trusted_already
from turnwise.models.lora import Gathered
from turnwise.runtime.disk import writing
from turnwise.training.optimizer import LossScale

TRAINER_FILE = "trainer_state.pt"
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
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True, mmap=is_mapped)
        if not {"optimizer", "random", "cuda_rng"} <= state.keys():
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
    saved, missing, unexpected = load_pretrained(type(model), folder, config, dtype=model.dtype, trust=trust)
    require_weights(folder, missing, unexpected)
    copy_weights(saved, model, gathered, copy)


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
