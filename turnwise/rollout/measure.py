"""Metrics of finished trajectories, under the names that other frameworks use (`rollout/…`, `env/{tag}/…`,
`val/…`)."""

from collections.abc import Iterable, Sequence
from itertools import chain

from turnwise.rollout.source import played_of
from turnwise.types import Group, Metric, Sample, Trajectory, Turn, are_equal, samples_of


def rollout_metrics(groups: Sequence[Group], rejected: Sequence[Group] = ()) -> list[Metric]:
    """Scores, lengths and environment metrics of a training batch, and what was lost to failed episodes and
    to the filter.

    `rollout/failed` counts episodes that failed after their retries, `rollout/rejected` these and their
    siblings, and `rollout/filtered` the episodes of groups that the filter dropped. `rollout/stale_groups`
    counts groups dropped as too old. All scores leave filtered groups out, except `rollout/unfiltered_score`.

    `rollout/parsed` covers only agents with the metric `num_actions`, since others may parse no actions.
    `rollout/log_prob` comes from the servers, without a forward pass; its negative estimates the policy's
    entropy.

    `rollout/response_length` counts the sampled tokens of a trajectory, `rollout/prompt_length` its first
    prompt, and `rollout/non_prompt_length` everything after that prompt. `tokens/…` are the same lengths, but
    of samples."""
    played = _trajectories(groups)
    scores_by_group = [[t.score for t in g.trajectories] for g in groups]
    baselines = [g.greedy.score for g in groups if g.greedy]
    is_flat = [are_equal(scores) for scores in scores_by_group if len(scores) > 1]
    return [
        *_rejection_metrics(played, rejected),
        *_spread("rollout/score", [t.score for t in played]),
        *_scores_by_tag("rollout", played),
        *_mean("rollout/greedy_score/mean", baselines),
        *_length_metrics(played),
        *_turn_metrics(played),
        *_env_metrics(played, prefix="env", rewards="rollout"),
        *_mean("rollout/zero_variance_groups", is_flat),
        *_sample_metrics(samples_of(groups)),
    ]


def _rejection_metrics(played: Sequence[Trajectory], rejected: Sequence[Group]) -> list[Metric]:
    failed_groups = [g for g in rejected if g.rejected not in ("filtered", "stale")]
    lost = list(chain.from_iterable(map(played_of, failed_groups)))
    failed = [t for t in lost if t.status == "failed"]
    filtered = _trajectories(g for g in rejected if g.rejected == "filtered")
    metrics = [
        Metric("rollout/failed", _num_episodes(failed), "sum"),
        Metric("rollout/rejected", _num_episodes(lost), "sum"),
        Metric("rollout/filtered", _num_episodes(filtered), "sum"),
        Metric("rollout/stale_groups", sum(g.rejected == "stale" for g in rejected), "sum"),
    ]
    if filtered:
        scores = [t.score for t in [*played, *filtered]]
        metrics += _mean("rollout/unfiltered_score/mean", scores)
    return metrics


def _length_metrics(played: Sequence[Trajectory]) -> list[Metric]:
    prompts = [len(t.turns[0].prompt_ids) if t.turns else 0 for t in played]
    sampled = [sum(len(turn.response_ids) for turn in t.turns) for t in played]
    totals = [sum(turn.num_tokens for turn in t.turns) for t in played]
    return [
        *_spread("rollout/response_length", sampled),
        *_spread("rollout/prompt_length", prompts),
        *_spread("rollout/non_prompt_length", _differences(totals, prompts)),
        Metric("rollout/sampled_tokens", sum(sampled), "sum"),
        Metric("rollout/total_tokens", sum(totals), "sum"),
    ]


def _turn_metrics(played: Sequence[Trajectory]) -> list[Metric]:
    turns = _turns(played)
    acting = _turns(t for t in played if "num_actions" in t.metrics)
    metrics = [
        *_mean("rollout/num_turns", [len(t.turns) for t in played]),
        *_mean("rollout/num_contexts", [len(t.samples) for t in played]),
        Metric("rollout/num_samples", sum(len(t.samples) for t in played), "sum"),
        *_mean("rollout/truncated", [t.status == "truncated" for t in played]),
        *_mean("rollout/length_limited", [turn.finish_reason == "length" for turn in turns]),
        *_mean("rollout/parsed", [turn.action is not None for turn in acting]),
    ]
    num_sampled = sum(len(turn.logprobs) for turn in turns)
    if num_sampled:
        logprob_sum = sum(float(turn.logprobs.sum()) for turn in turns)
        metrics.append(Metric("rollout/log_prob/mean", logprob_sum / num_sampled, weight=num_sampled))
    return metrics


def system_metrics(
    samples: Sequence[Sample],
    elapsed_s: float,
    num_trajectories: int,
) -> list[Metric]:
    """Returns the step's tokens per second (`system/tps`) and the number of trajectories trained on
    (`system/samples`)."""
    return [
        Metric("system/tps", sum(sample.num_tokens for sample in samples) / elapsed_s),
        Metric("system/samples", num_trajectories, "last"),
    ]


def validation_metrics(groups: Sequence[Group]) -> list[Metric]:
    """Returns the metrics `val/…`. All but `val/failed`, the share of failed trajectories, leave failed
    episodes out."""
    trajectories = _trajectories(groups)
    played = [t for t in trajectories if t.status != "failed"]
    metrics = [
        *_mean("val/failed", [t.status == "failed" for t in trajectories]),
        Metric("val/num_episodes", _num_episodes(played), "sum"),
        *_spread("val/score", [t.score for t in played]),
    ]
    metrics += _scores_by_tag("val", played)
    metrics += _env_metrics(played, prefix="val/env", rewards="val")
    return metrics


def _trajectories(groups: Iterable[Group]) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group.trajectories]


def _turns(trajectories: Iterable[Trajectory]) -> list[Turn]:
    return [turn for trajectory in trajectories for turn in trajectory.turns]


def _differences(totals: Sequence[int], parts: Sequence[int]) -> list[int]:
    return [total - part for total, part in zip(totals, parts, strict=True)]


def _num_episodes(trajectories: Iterable[Trajectory]) -> int:
    """Number of episodes that the trajectories come from; an episode with sub-agents has several
    trajectories."""
    return len({(t.task.id, t.sibling) for t in trajectories})


def _sample_metrics(samples: Sequence[Sample]) -> list[Metric]:
    prompts = [s.turn_spans[0].start if s.turn_spans else s.num_tokens for s in samples]
    responses = [sum(span.stop - span.start for span in s.turn_spans) for s in samples]
    totals = [s.num_tokens for s in samples]
    metrics = [
        *_spread("tokens/response_length", responses),
        *_spread("tokens/prompt_length", prompts),
        *_spread("tokens/non_prompt_length", _differences(totals, prompts)),
    ]
    for sample in samples:
        logprobs_by_name = {"old": sample.old_logprobs, "ref": sample.ref_logprobs}
        for name, logprobs in logprobs_by_name.items():
            if logprobs is not None and sample.num_trained:
                mean = float(logprobs[sample.response_mask].mean())
                metrics.append(Metric(f"critic/{name}_log_prob/mean", mean, weight=sample.num_trained))
    return metrics


def _spread(name: str, values: Sequence[float]) -> list[Metric]:
    if not values:
        return []
    return [
        *_mean(f"{name}/mean", values),
        Metric(f"{name}/max", max(values), "max"),
        Metric(f"{name}/min", min(values), "min"),
    ]


def _scores_by_tag(prefix: str, trajectories: Sequence[Trajectory]) -> list[Metric]:
    by_tag: dict[str, list[float]] = {}
    for trajectory in trajectories:
        by_tag.setdefault(trajectory.task.tag, []).append(trajectory.score)
    metrics = []
    for tag, scores in by_tag.items():
        metrics += _spread(f"{prefix}/{tag}/score", scores)
    return metrics


def _mean(name: str, values: Sequence[float]) -> list[Metric]:
    """One metric for all values, so that the number of metrics doesn't grow with the number of
    trajectories."""
    if not values:
        return []
    mean = sum(values) / len(values)
    return [Metric(name, mean, weight=len(values))]


def _env_metrics(
    trajectories: Sequence[Trajectory],
    prefix: str,
    rewards: str,
) -> list[Metric]:
    """Means of trajectories' metrics. `reward/NAME` becomes `{rewards}/reward/NAME`, any other NAME
    `{prefix}/{tag}/NAME`."""
    measured: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in trajectory.metrics.items():
            is_reward = name.startswith("reward/")
            path = rewards if is_reward else f"{prefix}/{trajectory.task.tag}"
            measured.setdefault(f"{path}/{name}", []).append(value)
    metrics = []
    for name, values in measured.items():
        metrics += _mean(name, values)
    return metrics
