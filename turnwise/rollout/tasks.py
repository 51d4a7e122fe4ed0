"""Sources of tasks. A task depends only on its group's index and the source's state, not on the order in
which groups end."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from turnwise.errors import CheckpointError
from turnwise.types import Group, SamplingParams, Split, Task, derive_seed


class TaskSource(Protocol):
    """The tasks of one split. `task` is a pure function of a group's index and of a version of the source's
    state."""

    @property
    def num_tasks(self) -> int | None:
        """Number of tasks; None = no end."""

    @property
    def version(self) -> int:
        """Number of times that `observe` has changed the state."""

    def task(self, index: int, version: int | None = None) -> Task:
        """The task of group `index` (0, 1, 2, …), given a version of the state (None = the newest)."""

    def observe(self, groups: Sequence[Group]) -> None:
        """Learns from the groups of a batch how hard their tasks were."""

    def state_dict(self) -> dict[str, Any]:
        """The state, in JSON's types."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class FixedTasks:
    """Base class of the task sources that don't adapt to the results of played groups."""

    num_tasks: int | None = None
    version = 0

    def observe(self, groups: Sequence[Group]) -> None:
        """Does nothing: there is no state."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Does nothing: there is no state."""


@dataclass(frozen=True, slots=True)
class DataRow:
    """One row of a data set: the tag of its metrics, its agent, and its columns."""

    tag: str
    agent: str
    payload: Mapping[str, Any]


class RowTasks(FixedTasks):
    """Hands out every row once per epoch; if shuffled, in a different order each epoch. Without `num_epochs`,
    the tasks never end. The saved state is a hash of the rows and of `shuffle`; `load_state_dict` raises
    CheckpointError if either has changed.

    >>> rows = [DataRow("sums", "single_turn_agent", {"prompt": text}) for text in ("1+1", "1+2", "2+2")]
    >>> source = RowTasks(42, "train", rows, num_epochs=2)
    >>> sorted(source.task(i).row for i in range(3)), source.task(3).epoch, source.num_tasks
    ([0, 1, 2], 1, 6)
    """

    def __init__(
        self,
        run_seed: int,
        split: Split,
        rows: Sequence[DataRow],
        shuffle: bool = True,
        num_epochs: int | None = None,
    ) -> None:
        self.rows = rows
        self.num_tasks = None if num_epochs is None else num_epochs * len(rows)
        self._run_seed = run_seed
        self._split = split
        self._shuffle = shuffle
        self._order = lru_cache(maxsize=2)(self._order_of)

    def task(self, index: int, version: int | None = None) -> Task:
        epoch, place = divmod(index, len(self.rows))
        return self.of_row(int(self._order(epoch)[place]) if self._shuffle else place, index, epoch)

    def of_row(self, row: int, index: int, epoch: int) -> Task:
        """The task of group `index` if the group plays row number `row`."""
        tag, split = self.rows[row].tag, self._split
        return Task(
            id=f"{split}/{tag}/{index}",
            tag=tag,
            split=split,
            seed=derive_seed(self._run_seed, split, "row", row, index),
            epoch=epoch,
            payload=self.rows[row].payload,
            agent=self.rows[row].agent,
            row=row,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"rows_sha256": self._digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("rows_sha256") != self._digest:
            raise CheckpointError(
                "the rows of data.train_files, or how they are chosen and ordered (max_prompt_length, "
                "shuffle), have changed "
                "since the checkpoint was saved, so its position is meaningless; restore them, or start a "
                "new run from "
                "the weights with pretrain"
            )

    @cached_property
    def _digest(self) -> str:
        digest = hashlib.sha256(str(self._shuffle).encode())
        for row in self.rows:
            digest.update(json.dumps([row.tag, row.agent, row.payload], sort_keys=True).encode())
        return digest.hexdigest()

    def _order_of(self, epoch: int) -> NDArray[np.int64]:
        seed = derive_seed(self._run_seed, self._split, "order of rows", epoch)
        return np.random.default_rng(seed).permutation(len(self.rows))


@dataclass(frozen=True)
class SeededTasks(FixedTasks):
    """The endless sequence of tasks of seeded environments for one split. With `rows`, the groups of the tag
    `rows_tag` play the rows of a data set, and the sequence ends when no row is left.

    The groups come in rounds of `sum(partition)`. In each round `partition[i]` groups have the tag `tags[i]`,
    spread evenly, so that even a short batch has the tags in about these proportions. A group's slot is its
    position in its round.

    >>> source = SeededTasks(run_seed=42, split="train", tags=("FrozenLake", "Sokoban"), partition=(4, 2))
    >>> [source.task(i).tag for i in range(6)]
    ['FrozenLake', 'Sokoban', 'FrozenLake', 'FrozenLake', 'Sokoban', 'FrozenLake']
    >>> source.task(1) == source.task(1), source.task(0).seed == source.task(6).seed
    (True, False)
    """

    run_seed: int
    split: Split
    tags: Sequence[str]
    partition: Sequence[int]
    agents: Mapping[str, str] = field(default_factory=dict)
    """Tag → agent."""
    rows: RowTasks | None = None
    rows_tag: str = ""

    @property
    def num_tasks(self) -> int | None:  # type: ignore[override]
        """Number of groups until no row is left; None = no end."""
        num_rows = None if self.rows is None else self.rows.num_tasks
        places = [slot for slot, tag in enumerate(self._tags_of_round) if tag == self.rows_tag]
        if num_rows is None or not places:
            return None
        rounds, rest = divmod(num_rows, len(places))
        return rounds * len(self._tags_of_round) + places[rest]

    @cached_property
    def _tags_of_round(self) -> list[str]:
        """The tag of each slot. If a tag has n groups per round, its groups k = 0, 1, … get the sort keys (k
        + ½)/n, by which all groups of the round are sorted. If two groups have the same key, the earlier tag
        comes first."""
        places = [((k + 0.5) / count, i) for i, count in enumerate(self.partition) for k in range(count)]
        return [self.tags[i] for _, i in sorted(places)]

    def task(self, index: int, version: int | None = None) -> Task:
        tags = self._tags_of_round
        round_number, slot = divmod(index, len(tags))
        if self.rows is not None and tags[slot] == self.rows_tag:
            number = round_number * tags.count(self.rows_tag) + tags[:slot].count(self.rows_tag)
            return replace(self.rows.task(number), id=f"{self.split}/{self.rows_tag}/{index}")
        seed = derive_seed(self.run_seed, self.split, tags[slot], slot, round_number, 0)
        return _of_environment(self.split, tags[slot], index, seed, self.agents)

    def state_dict(self) -> dict[str, Any]:
        return self.rows.state_dict() if self.rows else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.rows:
            self.rows.load_state_dict(state)


def _of_environment(split: Split, tag: str, index: int, seed: int, agents: Mapping[str, str]) -> Task:
    return Task(id=f"{split}/{tag}/{index}", tag=tag, split=split, seed=seed, agent=agents.get(tag, ""))


@dataclass
class CurriculumTasks:
    """Draws the tag of each group: the more there is to learn from a tag, the higher its probability. If the
    tag is that of the data set (`rows_tag`), the row is drawn likewise.

    With the measured success p = (s + 1)/(n + 2), a tag or row has the weight 0.1 + 0.9 · 4p(1 − p): the
    highest at p = ½, the lowest where everything or nothing succeeds, and never 0. n counts the groups that
    were played, and s sums their shares of successful siblings. Each new group first multiplies n and s by
    0.9, so old measurements are forgotten."""

    run_seed: int
    split: Split
    tags: Sequence[str]
    agents: Mapping[str, str]
    rows: RowTasks | None = None
    rows_tag: str = ""
    num_versions: int = 2
    """How many of the newest versions are kept. A group may still be admitted or restarted with any of
    these."""
    version: int = field(init=False, default=0)

    _FLOOR, _DECAY = 0.1, 0.9

    def __post_init__(self) -> None:
        self.num_tasks = None if self.rows is None else self.rows.num_tasks
        self._history: dict[int, dict[str, tuple[float, float]]] = {
            0: {}
        }  # version → tag, or `row N`, → (s, n)
        self._limits = lru_cache(maxsize=self.num_versions)(self._limits_of)

    def task(self, index: int, version: int | None = None) -> Task:
        of_tags, of_rows = self._limits(self.version if version is None else version)
        draws = np.random.default_rng(derive_seed(self.run_seed, self.split, "curriculum", index)).random(2)
        tag = self.tags[_draw(of_tags, draws[0])]
        if self.rows is not None and tag == self.rows_tag:
            return self.rows.of_row(_draw(of_rows, draws[1]), index, epoch=index // len(self.rows.rows))
        seed = derive_seed(self.run_seed, self.split, tag, "curriculum", index)
        return _of_environment(self.split, tag, index, seed, self.agents)

    def observe(self, groups: Sequence[Group]) -> None:
        successes = dict(self._history[self.version])
        for group in groups:
            task = group.task
            ended = [trajectory for trajectory in group.trajectories if trajectory.status != "failed"]
            shares = [min(1.0, max(0.0, t.metrics.get("success", float(t.score > 0)))) for t in ended]
            keys = [task.tag] if task.row is None else [self.rows_tag, f"row {task.row}"]
            for key in keys if shares else ():
                s, n = successes.get(key, (0.0, 0.0))
                successes[key] = (self._DECAY * s + sum(shares) / len(shares), self._DECAY * n + 1.0)
        self.version += 1
        self._history[self.version] = successes
        self._history.pop(self.version - self.num_versions, None)

    def weight(self, key: str, version: int | None = None) -> float:
        """The weight of a tag, or of row N for the key `row N`, given a version of the state (None = the
        newest)."""
        s, n = self._history[self.version if version is None else version].get(key, (0.0, 0.0))
        p = (s + 1.0) / (n + 2.0)
        return self._FLOOR + (1.0 - self._FLOOR) * 4.0 * p * (1.0 - p)

    def state_dict(self) -> dict[str, Any]:
        history = [[version, successes] for version, successes in self._history.items()]
        return {"history": history, **(self.rows.state_dict() if self.rows else {})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "history" not in state:
            raise CheckpointError(
                "the checkpoint was saved without data.curriculum; leave it out, or start a new run from "
                "the weights"
            )
        if self.rows:
            self.rows.load_state_dict(state)
        self._history = {
            version: {key: (s, n) for key, (s, n) in of.items()} for version, of in state["history"]
        }
        self.version = max(self._history)
        self._limits.cache_clear()

    def _limits_of(self, version: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        of_rows = np.ones(len(self.rows.rows) if self.rows else 0)
        for key in self._history[version]:
            if key.startswith("row "):
                of_rows[int(key.removeprefix("row "))] = self.weight(key, version)
        return np.cumsum([self.weight(tag, version) for tag in self.tags]), np.cumsum(of_rows)


def _draw(limits: NDArray[np.float64], draw: float) -> int:
    """The index that a draw in [0, 1) falls on, given cumulative weights."""
    return min(int(np.searchsorted(limits, draw * limits[-1], side="right")), len(limits) - 1)


def sibling_sampling(sampling: SamplingParams, task: Task, sibling: int) -> SamplingParams:
    """The sampling parameters with the sibling's own seed, from which the conversation derives the seed of
    each turn. A retry of a failed episode uses the same seed, so it samples the same tokens as long as the
    observations are the same."""
    return replace(sampling, seed=derive_seed(task.seed, "tokens", sibling))
