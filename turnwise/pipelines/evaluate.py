"""Success of a policy on fixed tasks, with its uncertainty."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from turnwise.report.intervals import wilson_interval
from turnwise.types import Group, Trajectory


@dataclass(frozen=True, slots=True)
class Score:
    """Success of `num_episodes` episodes with the 95% Wilson interval; the interval treats episodes as independent."""

    num_episodes: int
    num_successes: int
    success: float
    low: float
    high: float
    mean_score: float

    @classmethod
    def count(cls, outcomes: Sequence[tuple[bool, float]]) -> Score:
        """From `(success, score)` of each episode."""
        n = len(outcomes)
        num_successes = sum(success for success, _ in outcomes)
        low, high = wilson_interval(num_successes, n)
        return cls(
            num_episodes=n,
            num_successes=num_successes,
            success=num_successes / max(n, 1),
            low=low,
            high=high,
            mean_score=sum(score for _, score in outcomes) / max(n, 1),
        )


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What `turnwise eval` reports: overall, by tag, and how many episodes failed for reasons outside the policy."""

    overall: Score
    by_tag: dict[str, Score]
    num_failed: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def evaluate(groups: Sequence[Group]) -> Evaluation:
    """Counts the successes of finished validation groups.

    An episode succeeds where its environment's own `success` metric says so, else where its score is positive.
    """
    trajectories = [t for g in groups for t in g.trajectories]
    played = [t for t in trajectories if t.status != "failed"]
    tags = sorted({t.task.tag for t in played})
    return Evaluation(
        overall=Score.count([_outcome(t) for t in played]),
        by_tag={tag: Score.count([_outcome(t) for t in played if t.task.tag == tag]) for tag in tags},
        num_failed=len(trajectories) - len(played),
    )


def _outcome(trajectory: Trajectory) -> tuple[bool, float]:
    success = trajectory.metrics.get("success", float(trajectory.score > 0)) > 0.5
    return success, trajectory.score


def success_table(rows: Sequence[tuple[str, Score]]) -> str:
    """A plain-text table of players and their success."""
    width = max(len("player"), *(len(name) for name, _ in rows))
    lines = [f"{'player':<{width}}  success  95% interval    episodes", "-" * (width + 35)]
    for name, s in rows:
        lines.append(f"{name:<{width}}  {s.success:7.3f}  [{s.low:.3f}, {s.high:.3f}]  {s.num_episodes:8d}")
    return "\n".join(lines)
