"""The ledger without template and server: branches share what comes before them, and every turn keeps its
ids."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from turnwise.batching.samples import build_samples
from turnwise.chat.ledger import EMPTY, Ledger, Prefix, Prompt
from turnwise.errors import RolloutError
from turnwise.types import Completion, SamplingParams, Task, Trajectory, VersionRun

SAMPLING = SamplingParams(max_new_tokens=8)


def answered(
    ledger: Ledger, before: Prefix, added_ids: list[int], response_ids: list[int], parent: int | None = None
) -> int:
    """Commits a response, and returns the number of its turn."""
    zeros = np.zeros(len(response_ids), np.float32)
    completion = Completion(np.array(response_ids), zeros, "stop", (VersionRun(0, len(response_ids)),))
    prompt = Prompt(before, array("q", added_ids))
    ledger.commit(prompt.turn(completion, SAMPLING, "", ""), prompt.answered(response_ids), parent)
    return len(ledger.turns) - 1


@pytest.fixture
def fork() -> Ledger:
    """Two branches leave the first turn; the second one goes on. The ids are those of tree.md's example."""
    ledger = Ledger("fork")
    root = answered(ledger, EMPTY, [2, 11, 5, 3], [12, 5])
    answered(ledger, ledger.prefix(root), [2, 14, 5, 3], [13, 5], parent=root)
    branch = answered(ledger, ledger.prefix(root), [2, 16, 5, 3], [17, 5], parent=root)
    answered(ledger, ledger.prefix(branch), [2, 18, 5, 3], [19, 5], parent=branch)
    answered(ledger, EMPTY, [1, 10, 5, 3], [20, 5])
    return ledger


def test_branches_are_the_contexts_that_the_server_saw_and_each_turn_is_trained_once(fork: Ledger) -> None:
    fork.verify()
    contexts = [fork.prefix(leaf).token_ids().tolist() for leaf in (1, 3, 4)]
    assert contexts == [
        [2, 11, 5, 3, 12, 5, 2, 14, 5, 3, 13, 5],
        [2, 11, 5, 3, 12, 5, 2, 16, 5, 3, 17, 5, 2, 18, 5, 3, 19, 5],
        [1, 10, 5, 3, 20, 5],
    ]
    assert [fork.prefix(leaf).num_tokens for leaf in (1, 3, 4)] == [len(context) for context in contexts]
    samples = build_samples(Trajectory(Task("t", "T", "train", 0), 0, turns=fork.turns))
    assert [sample.token_ids.tolist() for sample in samples] == contexts
    assert [[span.turn for span in sample.turn_spans] for sample in samples] == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("turn", range(5))
def test_a_changed_turn_of_any_branch_is_found_at_its_position(fork: Ledger, turn: int) -> None:
    fork.turns[turn].response_ids[1] += 1
    with pytest.raises(RolloutError, match=f"'fork' .* position {6 * turn + 5} on"):
        fork.verify()


def test_a_lost_turn_is_found(fork: Ledger) -> None:
    del fork.turns[2]
    with pytest.raises(RolloutError, match="hold 24 tokens and the server saw 30"):
        fork.verify()
