"""What is measured on finished trajectories, by the field's names (`rollout/…`, `env/{tag}/…`, `val/…`)."""

from __future__ import annotations

from collections.abc import Sequence

from turnwise.types import Group, Metric, Reduction, Trajectory

_SPREAD: tuple[Reduction, ...] = ("mean", "max", "min")


def rollout_metrics(groups: Sequence[Group], rejected: Sequence[Group] = ()) -> list[Metric]:
    """Scores, lengths and environment metrics of a training batch, and what was lost to failed episodes.

    `rollout/failed` counts episodes that failed after their retries, `rollout/rejected` their siblings too.

    `rollout/response_length` counts sampled tokens of a trajectory, `rollout/prompt_length` its first prompt and
    `rollout/non_prompt_length` everything after it.
    """
    played = [t for g in groups for t in g.trajectories]
    lost = [t for g in rejected for t in g.trajectories]
    metrics = [
        Metric("rollout/failed", sum(t.status == "failed" for t in lost), "sum"),
        Metric("rollout/rejected", len(lost), "sum"),
    ]
    for trajectory in played:
        first = len(trajectory.turns[0].prompt_ids) if trajectory.turns else 0
        total = sum(turn.num_tokens for turn in trajectory.turns)
        sampled = sum(len(turn.response_ids) for turn in trajectory.turns)
        metrics += _spread("rollout/score", trajectory.score)
        metrics += _spread("rollout/response_length", sampled)
        metrics += _spread("rollout/prompt_length", first)
        metrics += _spread("rollout/non_prompt_length", total - first)
        metrics.append(Metric("rollout/sampled_tokens", sampled, "sum"))
        metrics.append(Metric("rollout/total_tokens", total, "sum"))
        metrics.append(Metric("rollout/num_turns", len(trajectory.turns)))
        metrics.append(Metric("rollout/truncated", float(trajectory.status == "truncated")))
    metrics += _env_metrics(played, prefix="env")
    scores = [[t.score for t in g.trajectories] for g in groups]
    metrics += [Metric("rollout/zero_variance_groups", float(len(set(s)) <= 1)) for s in scores]
    return metrics


def validation_metrics(groups: Sequence[Group]) -> list[Metric]:
    """`val/score/…`, `val/{tag}/score/…` and `val/env/{tag}/…`; failed episodes are counted, not scored."""
    trajectories = [t for g in groups for t in g.trajectories]
    played = [t for t in trajectories if t.status != "failed"]
    metrics = [Metric("val/failed", float(t.status == "failed")) for t in trajectories]
    for trajectory in played:
        metrics += _spread("val/score", trajectory.score)
        metrics += _spread(f"val/{trajectory.task.tag}/score", trajectory.score)
    return metrics + _env_metrics(played, prefix="val/env")


def _spread(name: str, value: float) -> list[Metric]:
    return [Metric(f"{name}/{reduction}", value, reduction) for reduction in _SPREAD]


def _env_metrics(trajectories: Sequence[Trajectory], prefix: str) -> list[Metric]:
    return [Metric(f"{prefix}/{t.task.tag}/{name}", value) for t in trajectories for name, value in t.metrics.items()]
