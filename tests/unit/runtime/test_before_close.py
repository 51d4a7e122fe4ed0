"""What a run's event loop does before it closes."""

from __future__ import annotations

import asyncio

import pytest

from turnwise.runtime.event_loop import WatchedRunner


def test_it_runs_what_it_was_given_newest_first_and_then_ends_its_tasks() -> None:
    seen: list[str] = []

    async def note(name: str) -> None:
        await asyncio.sleep(0)
        seen.append(name)

    with WatchedRunner() as runner:
        runner.before_close(lambda: note("first"))
        runner.before_close(lambda: note("second"))
        runner.at_close(lambda: seen.append("closed"))
    assert seen == ["second", "first", "closed"]


def test_it_closes_even_if_one_of_them_raises() -> None:
    async def fail() -> None:
        raise ValueError("no")

    runner = WatchedRunner()
    runner.run(asyncio.sleep(0))
    loop = runner.loop
    runner.before_close(fail)
    with pytest.raises(ValueError, match="no"):
        runner.close()
    assert loop.is_closed()
