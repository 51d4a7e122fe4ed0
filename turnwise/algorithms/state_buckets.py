"""Groups turns by their state, and measures how well observations tell states apart."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import numpy as np

from turnwise.algorithms.response_tokens import Index, ResponseTokens
from turnwise.types import Metric, Turn


def state_buckets(tokens: ResponseTokens, groups: Index) -> Index:
    """The bucket of each turn [K]: turns share a number if they have the same entry of `groups` [K] and an equal `state_key`.

    Groups of other tasks never share a bucket, however alike their states look.

    Raises:
        ValueError: a turn has no `state_key`.
    """
    buckets: dict[tuple[int, Hashable], int] = {}
    found = []
    for turn, group in zip(credited_turns(tokens), groups.tolist(), strict=True):
        if turn.state_key is None:
            raise ValueError(
                "adv_estimator gigpo compares turns that were taken in the same state, and a turn has no state_key (its "
                f"observation begins {turn.observation[:40]!r}); the agent loop must set it, as env_agent does"
            )
        found.append(buckets.setdefault((group, turn.state_key), len(buckets)))
    return np.array(found, np.int64)


def bucket_metrics(tokens: ResponseTokens, groups: Index, buckets: Index) -> list[Metric]:
    """How many turns share a state, and how often observations hide the state: a turn is *aliased* if another turn of its group
    shows the same observation in another state."""
    if not len(buckets):
        return []
    sizes = np.bincount(buckets)
    seen: dict[tuple[int, str], set[int]] = {}
    shown = [(group, turn.observation) for turn, group in zip(credited_turns(tokens), groups.tolist(), strict=True)]
    for key, bucket in zip(shown, buckets.tolist(), strict=True):
        seen.setdefault(key, set()).add(bucket)
    num_aliased = sum(len(seen[key]) > 1 for key in shown)
    return [
        Metric("critic/bucket_size/mean", float(sizes.mean()), weight=len(sizes)),
        Metric("critic/bucket_size/max", float(sizes.max()), "max"),
        Metric("critic/bucket_of_one", float((sizes == 1).mean()), weight=len(sizes)),
        Metric("critic/aliased_turns", num_aliased / len(buckets), weight=len(buckets)),
    ]


def credited_turns(tokens: ResponseTokens) -> Iterator[Turn]:
    """The K turns with a trained token."""
    for owner, index in zip(tokens.trajectory_of_turn.tolist(), tokens.turn_index.tolist(), strict=True):
        yield tokens.trajectories[owner].turns[index]
