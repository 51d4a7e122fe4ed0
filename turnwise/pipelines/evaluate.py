"""Success of a policy on fixed tasks, with its uncertainty."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import comb
from types import MappingProxyType
from typing import Any, NamedTuple

from turnwise.errors import counted
from turnwise.report.intervals import clustered_interval
from turnwise.types import Group, Trajectory


class EpisodeResult(NamedTuple):
    """The result of one episode."""

    is_success: bool
    score: float
    num_turns: int = 0
    num_tokens: int = 0
    """Sampled tokens."""
    is_truncated: bool = False
    metrics: Mapping[str, float] = MappingProxyType({})
    """What the environment measured."""

    @classmethod
    def of_group(cls, group: Group) -> "list[EpisodeResult]":
        """The results of the group's episodes that didn't fail. An episode may have several trajectories, all
        with its score. An episode succeeds if its environment's metric `success` exceeds 0.5; without that
        metric, if its score is positive."""
        episodes: dict[int, list[Trajectory]] = {}
        for trajectory in group.trajectories:
            episodes.setdefault(trajectory.sibling, []).append(trajectory)
        results = []
        for parts in episodes.values():
            statuses = {part.status for part in parts}
            if "failed" in statuses:
                continue
            first = parts[0]
            turns = [turn for part in parts for turn in part.turns]
            result = cls(
                is_success=first.metrics.get("success", float(first.score > 0)) > 0.5,
                score=first.score,
                num_turns=len(turns),
                num_tokens=sum(len(turn.response_ids) for turn in turns),
                is_truncated="truncated" in statuses,
                metrics=first.metrics,
            )
            results.append(result)
        return results


@dataclass(frozen=True, slots=True)
class Score:
    """Success rate over the episodes of several tasks, its 95% interval (`clustered_interval`), and means per
    episode."""

    num_episodes: int
    num_successes: int
    success: float
    low: float
    high: float
    mean_score: float
    num_tasks: int
    mean_turns: float
    mean_tokens: float
    truncated: float
    """Share of episodes that a limit ended."""
    pass_at: Mapping[int, float] = field(default_factory=dict)
    """pass@k by k, if tasks were sampled several times."""
    pass_at_tasks: Mapping[int, int] = field(default_factory=dict)
    """By k, the number of tasks with at least k episodes, over which pass@k is the mean."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Means of the environments' metrics, each over the episodes that report it."""

    @classmethod
    def count(cls, outcomes: Sequence[tuple[bool, float]]) -> "Score":
        """The score of `(success, score)` pairs, one episode per task."""
        return cls.of_tasks([[EpisodeResult(*outcome)] for outcome in outcomes])

    @classmethod
    def of_tasks(cls, tasks: Sequence[Sequence[EpisodeResult]]) -> "Score":
        """The score of several tasks, from the episodes of each task."""
        episodes = [outcome for task in tasks for outcome in task]
        successes = [sum(outcome.is_success for outcome in task) for task in tasks]
        trials = [len(task) for task in tasks]
        low, high = clustered_interval(successes, trials)
        return cls(
            num_episodes=len(episodes),
            num_successes=sum(successes),
            success=_mean(outcome.is_success for outcome in episodes),
            low=low,
            high=high,
            mean_score=_mean(outcome.score for outcome in episodes),
            num_tasks=len(tasks),
            mean_turns=_mean(outcome.num_turns for outcome in episodes),
            mean_tokens=_mean(outcome.num_tokens for outcome in episodes),
            truncated=_mean(outcome.is_truncated for outcome in episodes),
            pass_at=_pass_at(successes, trials),
            pass_at_tasks={k: sum(n >= k for n in trials) for k in _sample_sizes(trials)},
            metrics=_means_of_metrics(episodes),
        )


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What `turnwise eval` reports of a model: overall, by tag, and how many episodes failed for reasons
    outside the policy."""

    overall: Score
    by_tag: dict[str, Score]
    num_failed: int

    @classmethod
    def of(cls, outcomes: Mapping[str, Sequence[Sequence[EpisodeResult]]], num_failed: int) -> "Evaluation":
        """The evaluation of `outcomes`: tag → tasks, where each task is a list of its episodes' results."""
        return cls(
            overall=Score.of_tasks([task for tasks in outcomes.values() for task in tasks]),
            by_tag={tag: Score.of_tasks(outcomes[tag]) for tag in sorted(outcomes)},
            num_failed=num_failed,
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def rows(self) -> list[tuple[str, Score]]:
        """The named scores for a table: that of all tags, and each tag's if there are several."""
        rows = [("all", self.overall)]
        if len(self.by_tag) > 1:
            rows.extend(self.by_tag.items())
        return rows

    def __str__(self) -> str:
        return "\n".join([score_table(self.rows()), *self.too_few_samples(), *self.failures()])

    def too_few_samples(self) -> list[str]:
        """For each k, a sentence that says how many tasks pass@k covers, if it covers less than all."""
        total = self.overall.num_tasks
        return [
            f"pass@{k}: over {num_tasks} of {counted(total, 'task')}; the others have fewer than "
            f"{counted(k, 'episode')}"
            for k, num_tasks in self.overall.pass_at_tasks.items()
            if num_tasks < total
        ]

    def failures(self) -> list[str]:
        """A sentence about the failed episodes, if there are any."""
        if not self.num_failed:
            return []
        return [f"not counted: {counted(self.num_failed, 'episode')} that failed outside the policy"]


def evaluate(groups: Sequence[Group]) -> Evaluation:
    """The evaluation of these groups. Failed episodes count in `num_failed` only."""
    by_tag: dict[str, list[list[EpisodeResult]]] = {}
    num_failed = 0
    for group in groups:
        played = EpisodeResult.of_group(group)
        if played:
            by_tag.setdefault(group.task.tag, []).append(played)
        num_failed += len({t.sibling for t in group.trajectories if t.status == "failed"})
    return Evaluation.of(by_tag, num_failed)


def pass_at_k(num_samples: int, num_successes: int, k: int) -> float:
    """Estimates the chance that at least one of k samples of a task succeeds, from c successes among n ≥ k
    samples: 1 − C(n−c, k)/C(n, k), which is unbiased (Chen et al. 2021, arXiv:2107.03374, eq. 1).

    >>> pass_at_k(4, 1, k=1), pass_at_k(4, 1, k=2), pass_at_k(4, 3, k=2)
    (0.25, 0.5, 1.0)
    """
    return 1.0 - comb(num_samples - num_successes, k) / comb(num_samples, k)


def _pass_at(successes: Sequence[int], trials: Sequence[int]) -> dict[int, float]:
    """Mean pass@k of the tasks with at least k samples, for each of the `_sample_sizes`."""
    pass_at: dict[int, float] = {}
    for k in _sample_sizes(trials):
        tasks = zip(trials, successes, strict=True)
        pass_at[k] = _mean(pass_at_k(n, c, k) for n, c in tasks if n >= k)
    return pass_at


def _sample_sizes(trials: Sequence[int]) -> list[int]:
    """k = 1, 2, 4, … and m, the maximum samples per task; none if m = 1."""
    max_samples = max(trials, default=1)
    if max_samples == 1:
        return []
    powers = [1 << exponent for exponent in range(max_samples.bit_length())]
    return [*(power for power in powers if power < max_samples), max_samples]


def _means_of_metrics(episodes: Sequence[EpisodeResult]) -> dict[str, float]:
    names = sorted({name for episode in episodes for name in episode.metrics})
    return {
        name: _mean(episode.metrics[name] for episode in episodes if name in episode.metrics)
        for name in names
    }


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / max(len(listed), 1)


def success_table(rows: Sequence[tuple[str, Score]]) -> str:
    """A plain-text table of named players with their success, its interval, and their number of episodes."""
    return _table("player", rows, ())


def score_table(rows: Sequence[tuple[str, Score]], shown: Sequence[str] = ()) -> str:
    """A plain-text table of named scores: success, its interval, pass@k, means per episode, and the means of
    the environments' metrics that are to be shown; blank where no episode reports one."""
    sample_sizes = {k for _, score in rows for k in score.pass_at}
    return _table("", rows, sorted(sample_sizes - {1}), has_lengths=True, shown=shown)


def _table(
    title: str,
    rows: Sequence[tuple[str, Score]],
    ks: Sequence[int],
    has_lengths: bool = False,
    shown: Sequence[str] = (),
) -> str:
    names = [name for name, _ in rows]
    width = max(len(title), *map(len, names))
    header = f"{title:<{width}}  success  95% interval    episodes"
    for k in ks:
        header += f"  {f'pass@{k}':>7}"
    if has_lengths:
        header += "    score  turns  tokens  truncated"
    for name in shown:
        header += f"  {name:>7}"
    lines = [header, "-" * len(header)]
    for name, s in rows:
        line = f"{name:<{width}}  {s.success:7.3f}  [{s.low:.3f}, {s.high:.3f}]  {s.num_episodes:8d}"
        for k in ks:
            line += f"  {s.pass_at[k]:7.3f}" if k in s.pass_at else " " * 9
        if has_lengths:
            line += f"  {s.mean_score:7.3f}  {s.mean_turns:5.1f}  {s.mean_tokens:6.1f}  {s.truncated:9.1%}"
        for metric in shown:
            cell = f"{s.metrics[metric]:.3f}" if metric in s.metrics else ""
            line += f"  {cell:>{max(len(metric), 7)}}"
        lines.append(line)
    return "\n".join(lines)
