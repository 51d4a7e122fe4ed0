"""Strategies on two ranks, each a process, as one `TrainStrategy`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rank_workers import Kind

from turnwise.protocols import WHOLE_STEP, Loss, SavedForm, StepPart, Workers
from turnwise.runtime.rank import RankContext
from turnwise.types import Batch, Metric

NUM_RANKS = 2


class Strategies:
    """The worker of one rank, which has any number of strategies."""

    def __init__(self, rank: RankContext) -> None:
        self._rank = rank
        self._strategies: list[Any] = []

    def make(self, kind: Kind) -> int:
        self._strategies.append(kind.make(self._rank))
        return len(self._strategies) - 1

    def ask(self, number: int, method: str, *args: Any, **options: Any) -> Any:
        return getattr(self._strategies[number], method)(*args, **options)

    def ask_share(self, number: int, method: str, shares: list[list[Batch]], *args: Any) -> Any:
        """As `ask`, with this rank's share of the micro-batches before the arguments."""
        return self.ask(number, method, shares[self._rank.rank], *args)

    def weights(self, number: int) -> dict[str, Any]:
        return {name: tensor.numpy().copy() for name, tensor in self._strategies[number].weights()}

    def modes(self, number: int) -> list[bool]:
        return [module.training for module in self._strategies[number].model.modules()]


class TwoRanks:
    """The strategies that two `Strategies` make of a kind. The ranks get the same number of micro-batches:
    the second may have one of weight 0."""

    def __init__(self, workers: Workers, kind: Kind) -> None:
        self._workers = workers
        self._number = self._all("make", kind)[0]

    def forward(self, batches: Sequence[Batch], outputs: frozenset[Any]) -> list[dict[str, Any]]:
        results = self._all("ask_share", self._number, "forward", _dealt(batches), outputs)
        return [result for dealt in zip(*results, strict=True) for result in dealt][: len(batches)]

    def train_step(
        self,
        micro_batches: Sequence[Batch],
        loss: Loss,
        position: float = 0.0,
        part: StepPart = WHOLE_STEP,
    ) -> list[Metric]:
        results = self._all(
            "ask_share", self._number, "train_step", _dealt(micro_batches), loss, position, part
        )
        return [metric for metrics in results for metric in metrics]

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, array in self._all("weights", self._number)[0].items():
            yield name, torch.from_numpy(array)

    def save(self, folder: Path, form: SavedForm = "training") -> None:
        self._all("ask", self._number, "save", folder, form)

    def load(self, folder: Path) -> None:
        self._all("ask", self._number, "load", folder)

    def offload(self, kinds: Sequence[str]) -> None:
        self._all("ask", self._number, "offload", kinds)

    def onload(self, kinds: Sequence[str]) -> None:
        self._all("ask", self._number, "onload", kinds)

    def modules(self) -> list[SimpleNamespace]:
        modes = [mode for of_rank in self._all("modes", self._number) for mode in of_rank]
        return [SimpleNamespace(training=mode) for mode in modes]

    def _all(self, method: str, *args: Any) -> list[Any]:
        """What each rank answers."""
        pending = [self._workers.at(rank).call(method, *args) for rank in range(NUM_RANKS)]
        return [answer.result() for answer in pending]


def _dealt(batches: Sequence[Batch]) -> list[list[Batch]]:
    dealt = [list(batches[rank::NUM_RANKS]) for rank in range(NUM_RANKS)]
    if len(dealt[1]) < len(dealt[0]):
        dealt[1].append(replace(batches[-1], weights=0 * batches[-1].weights))
    return dealt
