"""AdamW's moments in a checkpoint, by the names of the parameters, whatever form the checkpoint has."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from turnwise.errors import ModelError
from turnwise.models.shares import MOMENTS, Shares, moment_key
from turnwise.training.optimizer import moment_numbers

Trained = list[tuple[str, torch.Size]]
"""Name and whole shape of each trained parameter, in the order of the model."""


class SavedMoments(Protocol):
    """Moments of trained parameters. Raises ModelError for one of another shape."""

    def step(self, name: str) -> Tensor | None:
        """float32 []: how many steps AdamW has made of a parameter; None if it never had a gradient, and so
        has no moments."""
        ...

    def rows(self, name: str, moment: str, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` of one of the `MOMENTS`."""
        ...

    def whole(self, name: str, moment: str) -> Tensor: ...


class NumberedMoments:
    """The state that plain AdamW saves: whole tensors, by the number of the parameter."""

    def __init__(self, state: Mapping[int, Any], trained: Trained) -> None:
        self._state = state
        self._numbers = moment_numbers(trained)
        self._shapes = dict(trained)

    def step(self, name: str) -> Tensor | None:
        saved = self._state.get(self._numbers[name])
        return None if saved is None else saved["step"]

    def rows(self, name: str, moment: str, start: int, stop: int) -> Tensor:
        return self.whole(name, moment)[start:stop]

    def whole(self, name: str, moment: str) -> Tensor:
        tensor: Tensor = self._state[self._numbers[name]][moment]
        if tensor.shape != self._shapes[name]:
            raise ModelError(
                f"the saved moments of {name} have shape {tuple(tensor.shape)}, and this model has "
                f"{tuple(self._shapes[name])}: other parameters were trained"
            )
        return tensor


class SharedMoments:
    """The moments of a checkpoint by shares."""

    def __init__(self, shares: Shares, steps: Mapping[str, float], trained: Trained) -> None:
        self._shares = shares
        self._steps = steps
        self._shapes = dict(trained)
        foreign = sorted(set(steps) - self._shapes.keys())
        if foreign:
            raise ModelError(
                f"{shares.folder} has moments of {foreign[0]}, which isn't trained here: set lora_rank and "
                "freeze_module_prefix as they were"
            )

    def step(self, name: str) -> Tensor | None:
        number = self._steps.get(name)
        return None if number is None else torch.tensor(float(number))

    def rows(self, name: str, moment: str, start: int, stop: int) -> Tensor:
        return self._shares.rows(moment_key(moment, name), self._shapes[name], start, stop)

    def whole(self, name: str, moment: str) -> Tensor:
        return self._shares.whole(moment_key(moment, name), self._shapes[name])


def whole_moments(saved: SavedMoments, trained: Trained) -> dict[int, dict[str, Tensor]]:
    """The state that plain AdamW loads."""
    state: dict[int, dict[str, Tensor]] = {}
    for name, number in moment_numbers(trained).items():
        step = saved.step(name)
        if step is not None:
            moments = {moment: saved.whole(name, moment) for moment in MOMENTS}
            state[number] = {"step": step, **moments}
    return state


def trained_of(named: Iterable[tuple[str, Tensor]]) -> Trained:
    """The trained ones of a model's parameters."""
    return [(name, parameter.shape) for name, parameter in named if parameter.requires_grad]
