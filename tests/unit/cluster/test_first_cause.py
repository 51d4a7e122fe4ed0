"""The cause of a failure of several ranks is one whose process has ended, also where that is known late."""

from __future__ import annotations

import asyncio
import threading
from operator import itemgetter
from typing import Any

import pytest

from turnwise.cluster import process_cluster
from turnwise.cluster.process_cluster import StartedAll
from turnwise.cluster.rank_process import CallSettings, RankProcess
from turnwise.errors import WorkerError
from turnwise.runtime.stopwatch import Stopwatch
from turnwise.runtime.watchdog import Watchdog


class Rank(RankProcess):
    """A rank that fails as it is told, once it may."""

    is_gone = False
    is_out_of_reach = False

    def __init__(self, error: Exception | None) -> None:
        super().__init__("a rank", CallSettings(asyncio.run, Watchdog(), Stopwatch()))
        self.may_answer = threading.Event()
        self._error = error

    def _ask(self, name: str, parcel: Any) -> Any:
        self.may_answer.wait()
        if self._error is not None:
            raise self._error

    def _stacks(self) -> str:
        return ""

    def _end(self) -> None: ...


SUM = RuntimeError("the sum's connection was closed")
DEATH = WorkerError("rank 1 has ended")


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[Rank]:
    monkeypatch.setattr(process_cluster, "_OTHERS_S", 0.01)
    monkeypatch.setattr(process_cluster, "_LOOK_S", 0.01)
    one = Rank(SUM)
    one.may_answer.set()
    return [one, Rank(DEATH)]


async def error_of(ranks: list[Rank], event: Any) -> BaseException:
    """What a call of the ranks raises, whose first has failed. `event` comes late."""
    call = StartedAll([rank.start("step", None) for rank in ranks], itemgetter(0))  # type: ignore[arg-type]
    waiting = asyncio.ensure_future(call._awaited())
    await asyncio.wait([waiting], timeout=0.2)
    event()
    [error] = await asyncio.gather(waiting, return_exceptions=True)
    return error


def test_a_process_out_of_reach_is_awaited_until_its_end_is_known(ranks: list[Rank]) -> None:
    ranks[1].is_out_of_reach = True

    def end() -> None:
        ranks[1].is_gone = True
        ranks[1].may_answer.set()

    assert asyncio.run(error_of(ranks, end)) is DEATH


def test_a_process_that_is_reached_again_is_not_the_cause(ranks: list[Rank]) -> None:
    ranks[1].is_out_of_reach = True

    def come_back() -> None:
        ranks[1].is_out_of_reach = False

    assert asyncio.run(error_of(ranks, come_back)) is SUM
    ranks[1].may_answer.set()


def test_a_rank_that_still_computes_is_not_awaited(ranks: list[Rank]) -> None:
    assert asyncio.run(error_of(ranks, ranks[1].may_answer.set)) is SUM
