"""The contract of strategies for FSDP2 on two ranks, each of which holds half of the model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import pytest
from rank_workers import Kind
from ranked_roles import cluster_of
from strategy_contract import VALUES, StrategyContract
from toy_model import toy_batches, toy_samples
from two_ranks import Strategies, TwoRanks

from turnwise.protocols import TrainStrategy, Workers
from turnwise.runtime.event_loop import WatchedRunner
from turnwise.runtime.stopwatch import Stopwatch
from turnwise.runtime.watchdog import Watchdog

pytestmark = [
    pytest.mark.extra,
    pytest.mark.skipif(not os.environ.get("TURNWISE_FULL"), reason="takes minutes; make test-full runs it"),
]


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with WatchedRunner(Watchdog()) as runner:
        cluster = cluster_of(runner, {"actor_train": [0, 1]}, Stopwatch())
        yield cluster.spawn("actor_train", Strategies)
        cluster.shutdown()


class TestFull(StrategyContract):
    kind: ClassVar = Kind(fsdp2={}, scheduler="linear")

    @pytest.fixture(autouse=True)
    def use(self, workers: Workers) -> None:
        self.workers = workers

    def make_strategy(self) -> TrainStrategy:
        return TwoRanks(self.workers, self.kind)

    def modules(self, strategy: Any) -> Iterable[Any]:
        return strategy.modules()

    def test_the_model_is_in_evaluation_mode_between_steps(self) -> None:
        """Without a loss that raises: the rank without samples would wait for the other, as in a run that
        ends."""
        strategy = self.make_strategy()
        strategy.train_step(toy_batches(toy_samples(3)), self.loss())
        assert not any(module.training for module in self.modules(strategy))


class TestLoRAWithGradientCheckpointing(TestFull):
    kind = Kind(fsdp2={}, scheduler="linear", rank=4, is_gradient_checkpointing=True)


class TestCritic(TestFull):
    kind = Kind("value", fsdp2={}, scheduler="linear", outputs=VALUES)
    outputs = VALUES


class TestGradientsSummedOnce(TestFull):
    kind = Kind(fsdp2={"sync_gradients": "last"}, scheduler="linear")


class TestCopies(TestFull):
    """Each rank has the whole model: what remains is a sum over the copies."""

    kind = Kind(fsdp2={"fsdp_size": 1}, scheduler="linear")
