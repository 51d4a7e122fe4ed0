"""Which task comes next, as a pure function of its index: nothing depends on what finished first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from turnwise.types import SamplingParams, Split, Task, derive_seed


@dataclass(frozen=True, slots=True)
class TaskSource:
    """The endless sequence of tasks of seeded environments for one split.

    Of every `sum(partition)` consecutive groups `partition[i]` are of `tags[i]`, spread as evenly as they go, so that a short
    batch meets every tag in its share. A group's slot is its place in that round, its episode the number of the round.

    >>> source = TaskSource(run_seed=42, split="train", tags=("FrozenLake", "Sokoban"), partition=(4, 2))
    >>> [source.task(i).tag for i in range(6)]
    ['FrozenLake', 'Sokoban', 'FrozenLake', 'FrozenLake', 'Sokoban', 'FrozenLake']
    >>> source.task(1) == source.task(1), source.task(0).seed == source.task(6).seed
    (True, False)
    """

    run_seed: int
    split: Split
    tags: Sequence[str]
    partition: Sequence[int]

    def task(self, index: int) -> Task:
        """The task of group `index` (0, 1, 2, …)."""
        tags = _round(tuple(self.tags), tuple(self.partition))
        episode, slot = divmod(index, len(tags))
        seed = derive_seed(self.run_seed, self.split, tags[slot], slot, episode, 0)
        return Task(id=f"{self.split}/{tags[slot]}/{index}", tag=tags[slot], split=self.split, seed=seed)


@lru_cache
def _round(tags: tuple[str, ...], partition: tuple[int, ...]) -> tuple[str, ...]:
    """The tag of each slot: the k-th of `count` groups of a tag stands at (k + ½)/count of the round."""
    places = [((k + 0.5) / count, i) for i, count in enumerate(partition) for k in range(count)]
    return tuple(tags[i] for _, i in sorted(places))


def sibling_sampling(sampling: SamplingParams, task: Task, sibling: int) -> SamplingParams:
    """The group's sampling parameters with a seed of this sibling's own; the conversation adds the turn to it.

    A retry of a failed episode uses the same seed, so that it meets the same tokens where the cause was outside.
    """
    return replace(sampling, seed=derive_seed(task.seed, "tokens", sibling))
