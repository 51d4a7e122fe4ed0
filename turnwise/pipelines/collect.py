"""Plays rollouts without a trainer, writes them to a file and sums them up."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from turnwise.errors import counted
from turnwise.pipelines.evaluate import EpisodeResult, Evaluation, score_table
from turnwise.rollout.failures import kind_of_failure
from turnwise.rollout.journal import Journal
from turnwise.rollout.scheduler import RolloutScheduler
from turnwise.rollout.source import played_of
from turnwise.types import Group

OnPlayed = Callable[[int, Sequence[Group]], None]


class Collection:
    """Plays batches, appends their trajectories to `file` (the first group creates it), and sums them up."""

    def __init__(self, file: Path) -> None:
        self.file = file.absolute()
        self.num_written = 0
        """Number of trajectories written to the file."""
        self._outcomes: dict[str, list[list[EpisodeResult]]] = {}
        self._groups: Counter[str | None] = Counter()  # by `Group.rejected`
        self._limits: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._elapsed_s = self._engine_s = self._environment_s = 0.0

    def play(
        self,
        scheduler: RolloutScheduler,
        num_batches: int,
        num_trajectories: int,
        begin_phase: Callable[[str], None] = lambda name: None,
        on_played: OnPlayed = lambda step, groups: None,
    ) -> None:
        """Plays batches of `num_trajectories`; tells `begin_phase` their names. `on_played` gets the groups
        of each, the first one's step is 0. Ctrl-C or an error loses no finished group."""
        for step in range(num_batches):
            begin_phase(f"batch {step + 1} of {num_batches}")
            started = time.perf_counter()
            try:
                scheduler.get_batch(num_trajectories)
            finally:
                self._elapsed_s += time.perf_counter() - started
                groups = [*scheduler.finished, *scheduler.rejected]
                if groups:
                    self._write(step, groups)
                    on_played(step, groups)

    def _write(self, step: int, groups: list[Group]) -> None:
        journal = Journal(self.file)
        journal.append(step, groups)
        journal.close()
        for group in groups:
            self._groups[group.rejected] += 1
            self.num_written += len(played_of(group))
            if played := EpisodeResult.of_group(group):
                self._outcomes.setdefault(group.task.tag, []).append(played)
            self._count_ends(group)
            for trajectory in played_of(group):
                for turn in trajectory.turns:
                    self._engine_s += turn.generate_s
                    self._environment_s += turn.step_s

    def _count_ends(self, group: Group) -> None:
        """Counts what ended the group's episodes. An episode with sub-agents has several trajectories, so
        limits and errors are counted once per sibling."""
        limits: dict[tuple[int, str], str] = {}
        for trajectory in group.trajectories:
            if trajectory.status != "failed" and trajectory.limit:
                limits[trajectory.sibling, trajectory.limit] = trajectory.limit
        errors: dict[int, str] = {}
        for trajectory in played_of(group):
            if trajectory.error is not None:
                errors[trajectory.sibling] = kind_of_failure(trajectory.error, group.task)
        self._limits.update(limits.values())
        self._failures.update(errors.values())

    def summary(self) -> dict[str, Any]:
        """Scores of all finished episodes, also of filtered groups; numbers of episodes by the limit or error
        that ended them, the most frequent first; seconds of waiting for tokens and environments, added up
        over concurrent episodes."""
        tasks = [task for tasks_of_tag in self._outcomes.values() for task in tasks_of_tag]
        sampled_tokens = sum(episode.num_tokens for task in tasks for episode in task)
        tokens_per_s = 0.0
        if self._elapsed_s:
            tokens_per_s = sampled_tokens / self._elapsed_s
        return {
            **self._evaluation().to_json(),
            "num_groups": self._groups.total(),
            "num_filtered": self._groups["filtered"],
            "num_written": self.num_written,
            "limits": dict(self._limits.most_common()),
            "failures": dict(self._failures.most_common()),
            "sampled_tokens": sampled_tokens,
            "elapsed_s": self._elapsed_s,
            "engine_s": self._engine_s,
            "environment_s": self._environment_s,
            "tokens_per_s": tokens_per_s,
        }

    def _evaluation(self) -> Evaluation:
        return Evaluation.of(self._outcomes, num_failed=self._failures.total())

    def render(self) -> str:
        """The summary as text: a table of scores, then one line for each other result."""
        summary = self.summary()
        evaluation = self._evaluation()
        lines = [score_table(evaluation.rows()), *evaluation.too_few_samples()]
        if self._limits:
            counts = [f"{count} by {limit}" for limit, count in self._limits.most_common()]
            lines.append(f"truncated  {', '.join(counts)}")
        if self._failures:
            [(error, count)] = self._failures.most_common(1)
            lines.append(
                f"failed     {counted(evaluation.num_failed, 'episode')}; most often ({count}×): {error}"
            )
        if summary["num_filtered"]:
            lines.append(
                f"filtered   {summary['num_filtered']} of {summary['num_groups']} groups, by group_filter"
            )
        speed = (
            f"{summary['sampled_tokens']:,} tokens in {self._elapsed_s:.1f} s, "
            f"{summary['tokens_per_s']:,.0f} a second"
        )
        waited_s = self._engine_s + self._environment_s
        if waited_s:
            speed += (
                f"; episodes waited {self._engine_s / waited_s:.1%} for the engine, the rest for environments"
            )
        return "\n".join([*lines, f"speed      {speed}"])
