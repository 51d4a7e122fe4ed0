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
from turnwise.types import Group, SamplingParams, Split, Task, Trajectory, derive_seed

_Sums = tuple[float, float]  # (s, n) of `CurriculumTasks`
_Limits = NDArray[np.float64]


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
        epoch, row = divmod(index, len(self.rows))
        if self._shuffle:
            row = int(self._order(epoch)[row])
        return self.of_row(row, index, epoch)

    def of_row(self, row: int, index: int, epoch: int) -> Task:
        """The task of group `index` if the group plays row number `row`."""
        data_row = self.rows[row]
        return Task(
            id=f"{self._split}/{data_row.tag}/{index}",
            tag=data_row.tag,
            split=self._split,
            seed=derive_seed(self._run_seed, self._split, "row", row, index),
            epoch=epoch,
            payload=data_row.payload,
            agent=data_row.agent,
            row=row,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"rows_sha256": self._digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("rows_sha256") != self._digest:
            raise CheckpointError(
                "the rows of data.train_files, or how they are chosen and ordered (max_prompt_length, "
                "shuffle), have changed since the checkpoint was saved, so its position is meaningless; "
                "restore them, or start a new run from the weights with pretrain"
            )

    @cached_property
    def _digest(self) -> str:
        digest = hashlib.sha256(str(self._shuffle).encode())
        for row in self.rows:
            text = json.dumps([row.tag, row.agent, row.payload], sort_keys=True)
            digest.update(text.encode())
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
        if self.rows is None or self.rows.num_tasks is None:
            return None
        slots = [slot for slot, tag in enumerate(self._tags_of_round) if tag == self.rows_tag]
        if not slots:
            return None
        num_rounds, num_remaining = divmod(self.rows.num_tasks, len(slots))
        return num_rounds * len(self._tags_of_round) + slots[num_remaining]

    @cached_property
    def _tags_of_round(self) -> list[str]:
        """The tag of each slot. If a tag has n groups per round, its groups k = 0, 1, … get the sort keys (k
        + ½)/n, by which all groups of the round are sorted. If two groups have the same key, the earlier tag
        comes first."""
        sort_keys = []
        for i, count in enumerate(self.partition):
            sort_keys += [((k + 0.5) / count, i) for k in range(count)]
        return [self.tags[i] for _, i in sorted(sort_keys)]

    def task(self, index: int, version: int | None = None) -> Task:
        tags = self._tags_of_round
        round_number, slot = divmod(index, len(tags))
        tag = tags[slot]
        if self.rows is not None and tag == self.rows_tag:
            num_in_earlier_rounds = round_number * tags.count(tag)
            task = self.rows.task(num_in_earlier_rounds + tags[:slot].count(tag))
            return replace(task, id=f"{self.split}/{tag}/{index}")
        seed = derive_seed(self.run_seed, self.split, tag, slot, round_number, 0)
        return _of_environment(self.split, tag, index, seed, self.agents)

    def state_dict(self) -> dict[str, Any]:
        return self.rows.state_dict() if self.rows else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.rows:
            self.rows.load_state_dict(state)


def _of_environment(
    split: Split,
    tag: str,
    index: int,
    seed: int,
    agents: Mapping[str, str],
) -> Task:
    return Task(
        id=f"{split}/{tag}/{index}",
        tag=tag,
        split=split,
        seed=seed,
        agent=agents.get(tag, ""),
    )


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

    _FLOOR = 0.1
    _DECAY = 0.9

    def __post_init__(self) -> None:
        self.num_tasks = None if self.rows is None else self.rows.num_tasks
        # Version → tag, or `row N`, → (s, n).
        self._history: dict[int, dict[str, _Sums]] = {0: {}}
        self._limits = lru_cache(maxsize=self.num_versions)(self._limits_of)

    def task(self, index: int, version: int | None = None) -> Task:
        if version is None:
            version = self.version
        limits_of_tags, limits_of_rows = self._limits(version)
        draw_seed = derive_seed(self.run_seed, self.split, "curriculum", index)
        generator = np.random.default_rng(draw_seed)
        tag_draw, row_draw = generator.random(2)
        tag = self.tags[_draw(limits_of_tags, tag_draw)]
        if self.rows is not None and tag == self.rows_tag:
            row = _draw(limits_of_rows, row_draw)
            epoch = index // len(self.rows.rows)
            return self.rows.of_row(row, index, epoch)
        seed = derive_seed(self.run_seed, self.split, tag, "curriculum", index)
        return _of_environment(self.split, tag, index, seed, self.agents)

    def observe(self, groups: Sequence[Group]) -> None:
        successes = dict(self._history[self.version])
        for group in groups:
            shares = [_success(t) for t in group.trajectories if t.status != "failed"]
            if not shares:
                continue
            row = group.task.row
            keys = [group.task.tag] if row is None else [self.rows_tag, f"row {row}"]
            for key in keys:
                s, n = successes.get(key, (0.0, 0.0))
                s = self._DECAY * s + sum(shares) / len(shares)
                n = self._DECAY * n + 1.0
                successes[key] = (s, n)
        self.version += 1
        self._history[self.version] = successes
        self._history.pop(self.version - self.num_versions, None)

    def weight(self, key: str, version: int | None = None) -> float:
        """The weight of a tag, or of row N for the key `row N`, given a version of the state (None = the
        newest)."""
        if version is None:
            version = self.version
        s, n = self._history[version].get(key, (0.0, 0.0))
        p = (s + 1.0) / (n + 2.0)
        return self._FLOOR + (1.0 - self._FLOOR) * 4.0 * p * (1.0 - p)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "history": [[version, successes] for version, successes in self._history.items()]
        }
        if self.rows:
            state |= self.rows.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "history" not in state:
            raise CheckpointError(
                "the checkpoint was saved without data.curriculum; remove it, or start a new run from "
                "the weights"
            )
        if self.rows:
            self.rows.load_state_dict(state)
        self._history = {}
        for version, successes in state["history"]:
            self._history[version] = {key: (s, n) for key, (s, n) in successes.items()}
        self.version = max(self._history)
        self._limits.cache_clear()

    def _limits_of(self, version: int) -> tuple[_Limits, _Limits]:
        """The cumulative weights of the tags and of the rows."""
        num_rows = 0 if self.rows is None else len(self.rows.rows)
        row_weights = np.ones(num_rows)
        for key in self._history[version]:
            if key.startswith("row "):
                row = int(key.removeprefix("row "))
                row_weights[row] = self.weight(key, version)
        tag_weights = [self.weight(tag, version) for tag in self.tags]
        return np.cumsum(tag_weights), np.cumsum(row_weights)


def _success(trajectory: Trajectory) -> float:
    """The share of success, from 0 to 1: the metric of that name, or whether the score is positive."""
    success = trajectory.metrics.get("success", float(trajectory.score > 0))
    return min(1.0, max(0.0, success))


def _draw(limits: _Limits, draw: float) -> int:
    """The index that a draw in [0, 1) falls on, given cumulative weights."""
    position = draw * limits[-1]
    index = int(np.searchsorted(limits, position, side="right"))
    return min(index, len(limits) - 1)


def sibling_sampling(
    sampling: SamplingParams,
    task: Task,
    sibling: int,
) -> SamplingParams:
    """The sampling parameters with the sibling's own seed, from which the conversation derives the seed of
    each turn. A retry of a failed episode uses the same seed, so it samples the same tokens as long as the
    observations are the same."""
    return replace(sampling, seed=derive_seed(task.seed, "tokens", sibling))
