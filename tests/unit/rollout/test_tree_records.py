"""What files keep of an episode with branches."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

from turnwise.errors import RolloutError
from turnwise.rollout.record import RecordKey, StateKeyWriter, read_record, write_record
from turnwise.rollout.recorded import RecordedServer
from turnwise.types import SamplingParams, Task, Trajectory, Turn, VersionRun

KEY = RecordKey(0, 0, 1, None, False)


def turn(prompt: list[int], response: list[int], parent: int | None = None, **fields: bool) -> Turn:
    zeros = np.zeros(len(response), np.float32)
    versions = (VersionRun(0, len(response)),)
    return Turn(np.array(prompt), np.array(response), zeros, versions, parent=parent, **fields)


def fork() -> Trajectory:
    turns = [
        turn([2, 11, 5, 3], [12, 5], starts_context=True),
        turn([2, 14, 5, 3], [13, 5], 0),
        turn([2, 16, 5, 3], [17, 5], 0, is_trained=False),
        turn([2, 11, 5, 3], [13, 5], starts_context=True),
    ]
    return Trajectory(Task("t", "T", "train", 0), 0, turns, answer_turn=1)


def test_a_line_keeps_branches_and_an_older_line_s_contexts_are_steps() -> None:
    line = write_record(KEY, fork(), StateKeyWriter())
    _, read = read_record(line)
    assert [entry.parent for entry in read.turns] == [None, 0, 0, None]
    assert [entry.is_trained for entry in read.turns] == [True, True, False, True]
    assert (read.contexts_are, read.answer_turn) == ("parts", 1)
    older = json.loads(line)
    del older["contexts_are"], older["answer_turn"], older["turns"][2]["is_trained"]
    _, read = read_record(json.dumps(older))
    assert (read.contexts_are, read.answer_turn) == ("steps", None) and read.turns[2].is_trained


def test_a_recorded_turn_is_found_by_the_ids_of_its_context_in_any_order() -> None:
    server = RecordedServer(fork())
    sampling = SamplingParams(max_new_tokens=4)

    async def ask(*ids: int) -> list[int]:
        return (await server.generate(ids, sampling, "r")).token_ids.tolist()

    async def play() -> None:
        assert await ask(2, 11, 5, 3, 12, 5, 2, 16, 5, 3) == [17, 5]
        assert await ask(2, 11, 5, 3) == [12, 5]
        assert await ask(2, 11, 5, 3) == [13, 5], "a twin"
        with pytest.raises(RolloutError, match="position 6"):
            await ask(2, 11, 5, 3, 12, 5, 4)

    asyncio.run(play())
