"""What a strategy writes next to its weights, so that training continues bit by bit."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel

from turnwise.errors import ModelError
from turnwise.models.load import load_model, write_weights, written_whole

_TRAINER_FILE = "trainer_state.pt"


def save_state(folder: Path, model: PreTrainedModel, optimizer: Optimizer | None, scheduler: LRScheduler | None) -> None:
    """Writes weights as a Hugging Face folder, and optimiser, schedule and random states beside them; whole or not at all."""
    state = {
        "optimizer": None if optimizer is None else optimizer.state_dict(),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "cpu_rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state_all(),
    }
    with written_whole(folder) as partial:
        write_weights(model, partial)
        torch.save(state, partial / _TRAINER_FILE)


def load_state(folder: Path, model: PreTrainedModel, optimizer: Optimizer | None, scheduler: LRScheduler | None) -> None:
    """Copies a saved state into the live objects, whose tensors stay where they are (an engine may share them).

    Raises:
        ModelError: no such folder, a state without optimiser where one is needed, or tensors of another shape.
    """
    file = folder / _TRAINER_FILE
    if not file.is_file():
        raise ModelError(f"{folder}: holds no training state ({_TRAINER_FILE}); `pretrain` loads plain model folders")
    copy_weights(load_model(folder, dtype=model.dtype), model)
    state = torch.load(file, map_location="cpu", weights_only=True)
    if optimizer is not None and scheduler is not None:
        if state["optimizer"] is None:
            raise ModelError(f"{folder}: was saved without an optimiser and can't continue training")
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
    torch.set_rng_state(state["cpu_rng"])
    if len(state["cuda_rng"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda_rng"])


@torch.no_grad()
def copy_weights(source: PreTrainedModel, target: PreTrainedModel) -> None:
    """Copies every parameter and persistent buffer in place.

    Raises:
        ModelError: the models don't have the same tensors.
    """
    origin, destination = source.state_dict(), target.state_dict()
    for name, tensor in destination.items():
        if name not in origin or origin[name].shape != tensor.shape:
            raise ModelError(f"the saved model has no tensor {name} of shape {tuple(tensor.shape)}; it is another architecture")
        tensor.copy_(origin[name])
