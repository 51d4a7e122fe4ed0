"""Rollouts without a trainer: written to a file and summed up."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from turnwise.errors import counted
from turnwise.pipelines.evaluate import EpisodeResult, Evaluation, score_table
from turnwise.rollout.failures import kind_of_failure
from turnwise.rollout.journal import Journal
from turnwise.rollout.scheduler import RolloutScheduler
from turnwise.rollout.source import played_of
from turnwise.types import Group


@dataclass(frozen=True, slots=True)
class Summary:
    """What `turnwise rollout` reports."""

    evaluation: Evaluation
    """Scores of all finished episodes, including those of filtered groups."""
    num_groups: int
    num_filtered: int
    """Groups that the filter dropped."""
    num_written: int
    """Trajectories in the file."""
    limits: dict[str, int]
    """Number of episodes that each limit ended."""
    failures: dict[str, int]
    """Number of episodes that each error ended, the most frequent first."""
    sampled_tokens: int
    elapsed_s: float
    engine_s: float
    """Seconds spent waiting for tokens, added up over concurrent episodes."""
    environment_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.sampled_tokens / self.elapsed_s if self.elapsed_s else 0.0

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        return {**values.pop("evaluation"), **values, "tokens_per_s": self.tokens_per_s}

    def render(self) -> str:
        """A table of scores, then one line for each other result."""
        rows = [("all", self.evaluation.overall)]
        if len(self.evaluation.by_tag) > 1:
            rows += list(self.evaluation.by_tag.items())
        lines = [score_table(rows)]
        if self.limits:
            lines.append("truncated  " + ", ".join(f"{count} by {limit}" for limit, count in self.limits.items()))
        if self.failures:
            error, count = next(iter(self.failures.items()))
            lines.append(f"failed     {counted(sum(self.failures.values()), 'episode')}; most often ({count}×): {error}")
        if self.num_filtered:
            lines.append(f"filtered   {self.num_filtered} of {self.num_groups} groups, by group_filter")
        speed = f"{self.sampled_tokens:,} tokens in {self.elapsed_s:.1f} s, {self.tokens_per_s:,.0f} a second"
        waited_s = self.engine_s + self.environment_s
        if waited_s:
            speed += f"; episodes waited {self.engine_s / waited_s:.1%} for the engine, the rest for environments"
        return "\n".join([*lines, f"speed      {speed}"])


class Collection:
    """Plays batches and appends them to a file, which is created with the first batch."""

    def __init__(self, file: Path) -> None:
        self.file = file.absolute()
        self._outcomes: dict[str, list[list[EpisodeResult]]] = {}
        self._groups: Counter[str | None] = Counter()
        self._limits: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._num_written = 0
        self._elapsed_s = self._engine_s = self._environment_s = 0.0

    @property
    def is_empty(self) -> bool:
        return self._num_written == 0

    def play(
        self,
        scheduler: RolloutScheduler,
        num_batches: int,
        num_trajectories: int,
        begin_phase: Callable[[str], None] = lambda name: None,
    ) -> None:
        """Plays `num_batches` batches and reports each to `begin_phase`. Ctrl-C or an error doesn't lose finished groups."""
        for step in range(num_batches):
            begin_phase(f"batch {step + 1} of {num_batches}")
            started = time.perf_counter()
            try:
                scheduler.get_batch(num_trajectories)
            finally:
                self._elapsed_s += time.perf_counter() - started
                self._write(step, [*scheduler.finished, *scheduler.rejected])

    def _write(self, step: int, groups: list[Group]) -> None:
        if not groups:
            return
        journal = Journal(self.file)
        journal.append(step, groups)
        journal.close()
        for group in groups:
            self._groups[group.rejected] += 1
            self._num_written += len(played_of(group))
            ended = [trajectory for trajectory in group.trajectories if trajectory.status != "failed"]
            if ended:
                self._outcomes.setdefault(group.task.tag, []).append([EpisodeResult.of(trajectory) for trajectory in ended])
            self._limits.update(trajectory.limit for trajectory in ended if trajectory.limit)
            self._failures.update(kind_of_failure(t.error, group.task) for t in played_of(group) if t.error is not None)
            for turn in (turn for trajectory in played_of(group) for turn in trajectory.turns):
                self._engine_s += turn.generate_s
                self._environment_s += turn.step_s

    def summary(self) -> Summary:
        evaluation = Evaluation.of(self._outcomes, num_failed=self._failures.total())
        return Summary(
            evaluation=evaluation,
            num_groups=self._groups.total(),
            num_filtered=self._groups["filtered"],
            num_written=self._num_written,
            limits=dict(self._limits.most_common()),
            failures=dict(self._failures.most_common()),
            sampled_tokens=sum(o.num_tokens for tasks in self._outcomes.values() for task in tasks for o in task),
            elapsed_s=self._elapsed_s,
            engine_s=self._engine_s,
            environment_s=self._environment_s,
        )
