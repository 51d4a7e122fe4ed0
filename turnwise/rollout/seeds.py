"""Which task comes next, as a pure function of its index: nothing depends on what finished first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from turnwise.types import SamplingParams, Split, Task, derive_seed


@dataclass(frozen=True, slots=True)
class TaskSource:
    """The endless sequence of tasks of seeded environments for one split.

    `partition[i]` of every `sum(partition)` consecutive groups are of `tags[i]`: group slot `index % sum(partition)` has a
    fixed tag, and `index // sum(partition)` counts its episodes.

    >>> source = TaskSource(run_seed=42, split="train", tags=("FrozenLake", "Sokoban"), partition=(2, 1))
    >>> [source.task(i).tag for i in range(4)]
    ['FrozenLake', 'FrozenLake', 'Sokoban', 'FrozenLake']
    >>> source.task(1) == source.task(1), source.task(0).seed == source.task(3).seed
    (True, False)
    """

    run_seed: int
    split: Split
    tags: Sequence[str]
    partition: Sequence[int]

    def task(self, index: int) -> Task:
        """The task of group `index` (0, 1, 2, …)."""
        episode, slot = divmod(index, sum(self.partition))
        tag = [tag for tag, count in zip(self.tags, self.partition, strict=True) for _ in range(count)][slot]
        seed = derive_seed(self.run_seed, self.split, tag, slot, episode, 0)
        return Task(id=f"{self.split}/{tag}/{index}", tag=tag, split=self.split, seed=seed)


def sibling_sampling(sampling: SamplingParams, task: Task, sibling: int) -> SamplingParams:
    """The group's sampling parameters with a seed of this sibling's own; the conversation adds the turn to it.

    A retry of a failed episode uses the same seed, so that it meets the same tokens where the cause was outside.
    """
    return replace(sampling, seed=derive_seed(task.seed, "tokens", sibling))
