"""The source of training batches: a scheduler of episodes, or a file of them (`turnwise train
--from-rollouts`)."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from turnwise.assemble.rollouts import RolloutContext, ServedPolicy, build_scheduler, scheduler_settings
from turnwise.config import AgenticConfig
from turnwise.errors import DataError
from turnwise.examine.examined import Examined
from turnwise.rollout.journal import read_groups
from turnwise.rollout.offline import OfflineRollouts
from turnwise.rollout.source import RolloutSource, played_of
from turnwise.rollout.tasks import TaskSource
from turnwise.types import Group, Trajectory

logger = logging.getLogger(__name__)

_ROUNDING = 1e-6
_NUM_DECODED = 256  # number of turns that are decoded to see whether this tokenizer made their tokens


def build_source(
    examined: Examined,
    policy: ServedPolicy,
    needs: frozenset[str],
    rollouts: Path | None = None,
    tasks: TaskSource | None = None,
) -> tuple[RolloutSource, int]:
    """The source of batches, which plays `tasks` or reads `rollouts`, and how many steps it can fill, at most
    `max_steps`."""
    config = examined.config
    if rollouts is None:
        settings = replace(
            scheduler_settings(config, "train", needs),
            async_generation_ratio=config.async_generation_ratio,
            drops_stale=config.stale_groups == "drop",
            is_ordered=config.deterministic,
            num_batches=config.max_steps,
        )
        source = build_scheduler(examined, policy, "train", tasks=tasks, settings=settings)
        num_planned = num_planned_steps(config, tasks) or config.max_steps
        return source, min(config.max_steps, num_planned)
    offline = build_offline_rollouts(examined, policy, needs, rollouts)
    return offline, min(config.max_steps, offline.num_batches(config.rollout_batch_size))


def num_planned_steps(config: AgenticConfig, tasks: TaskSource | None) -> int | None:
    """Steps until the tasks end, assuming that no step plays more groups than it trains on; None for endless
    tasks."""
    if tasks is None or tasks.num_tasks is None:
        return None
    groups_per_step = config.rollout_batch_size // config.train_env_manager.group_size
    return -(-tasks.num_tasks // groups_per_step)


def build_offline_rollouts(
    examined: Examined,
    policy: ServedPolicy,
    needs: frozenset[str],
    path: Path,
) -> OfflineRollouts:
    """The training batches of a file. Raises DataError if its groups don't fit the config, or too few are
    left to train on."""
    config = examined.config
    groups, summary = _read_trainable(examined, path)
    for problem in _problems(config, groups, policy, needs):
        raise DataError(f"{path}: {problem}")
    offline = OfflineRollouts(
        groups, config.train_env_manager.group_size, str(path), batch_size=config.rollout_batch_size
    )
    num_batches = offline.num_batches(config.rollout_batch_size)
    if num_batches == 0:
        raise DataError(
            f"{path} has {summary}, and a batch of rollout_batch_size {config.rollout_batch_size} has "
            f"{config.rollout_batch_size // offline.group_size}; play more with `turnwise rollout`, or lower "
            "rollout_batch_size"
        )
    if "values" in needs and config.critic_warmup >= num_batches:
        raise DataError(
            f"{path} has {num_batches} batches, and the first critic_warmup {config.critic_warmup} steps "
            "train the critic alone: the actor would never be trained; play more with `turnwise rollout`, or "
            "lower critic_warmup"
        )
    _log_contents(config, path, groups, summary)
    if num_batches < config.max_steps:
        logger.warning(
            "%s holds %d batches: training ends before its %d steps", path, num_batches, config.max_steps
        )
    return offline


def _read_trainable(examined: Examined, path: Path) -> tuple[list[Group], str]:
    """The groups of a file to train on, and a text: how many they are, and why the others were removed."""
    recording = read_groups(path, examined.config.sampling("train").temperature)
    for sentence in recording.lost:
        logger.warning("%s: %s", path, sentence)
    keep = examined.group_filter
    whole = [
        group
        for group in recording.groups
        if not group.rejected and all(t.status != "failed" for t in played_of(group))
    ]
    groups = [group for group in whole if keep is None or keep(group)]
    num_rejected = len(recording.groups) - len(whole)
    num_filtered = len(whole) - len(groups)
    removed = f"{num_rejected} were rejected when they were played, {num_filtered} by group_filter"
    return groups, f"{len(groups)} groups to train on (of {len(recording.groups)} complete ones {removed})"


def _log_contents(
    config: AgenticConfig,
    path: Path,
    groups: Sequence[Group],
    summary: str,
) -> None:
    """Logs which policy versions sampled the groups. Warns of tags that the config doesn't name."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    versions = sorted({run.version for turn in turns for run in turn.versions})
    ends = dict.fromkeys([*versions[:1], *versions[-1:]])
    logger.info(
        "%s has %s, sampled by policy versions %s of their run (first, last); the trained model computes "
        "its own log-probs",
        path,
        summary,
        ", ".join(str(version) for version in ends) or "unknown",
    )
    tags = {group.task.tag for group in groups if group.task.row is None}
    unknown = tags - set(config.train_env_manager.tags)
    if unknown:
        logger.warning(
            "%s holds tags that train_env_manager.tags doesn't name: %s", path, ", ".join(sorted(unknown))
        )


def _problems(
    config: AgenticConfig,
    groups: Sequence[Group],
    policy: RolloutContext,
    needs: frozenset[str],
) -> Iterator[str]:
    """Yields the reasons why these groups of a file ("it" in the texts) can't be trained on."""
    trajectories = [trajectory for group in groups for trajectory in played_of(group)]
    group_size = config.train_env_manager.group_size
    for group in groups:
        if group.task.split != "train":
            yield (
                f"{group.task.id} is a task of validation, which training must not see; play with --split "
                "train"
            )
        if group.task.row is None and group.task.tag not in config.custom_envs:
            tags = ", ".join(config.custom_envs) or "none"
            yield (
                f"{group.task.id} is of tag {group.task.tag!r}, which custom_envs ({tags}) doesn't have; "
                "add it there"
            )
        weights: dict[int, float] = {}
        for trajectory in group.trajectories:
            weights[trajectory.sibling] = weights.get(trajectory.sibling, 0.0) + trajectory.weight
        for sibling, weight in weights.items():
            if weight > 1 + _ROUNDING:
                yield (
                    f"sibling {sibling} of {group.task.id} is there more than once: its lines weigh "
                    f"{weight:g} together, and those of one episode must weigh 1; remove the duplicates, or "
                    "play again with `turnwise rollout`"
                )
        size = len({trajectory.sibling for trajectory in group.trajectories})
        if size != group_size:
            yield (
                f"its groups have {size} siblings ({group.task.id}), and train_env_manager.group_size is "
                f"{group_size}; set train_env_manager.group_size={size}"
            )
        if group.greedy is None and "greedy_sibling" in needs:
            yield (
                f"{group.task.id} has no greedy sibling, which adv_estimator {config.adv_estimator} needs; "
                "play with this config: `turnwise rollout`"
            )
    samples = [sample for trajectory in trajectories for sample in trajectory.samples]
    longest = max((sample.num_tokens for sample in samples), default=0)
    if longest > config.sequence_length:
        yield (
            f"its longest context has {longest} tokens, more than sequence_length {config.sequence_length}; "
            "raise that"
        )
    lacks_kept_ids = any(sample.num_trained and sample.kept_ids is None for sample in samples)
    if config.needs_kept_ids and lacks_kept_ids:
        yield (
            "it doesn't say which tokens each one was drawn from, which train_infer_correction and "
            "use_rollout_log_probs need under top_k; play again with `turnwise rollout`, or remove them"
        )
    yield from _foreign_tokens(trajectories, policy)


def _foreign_tokens(trajectories: Sequence[Trajectory], policy: RolloutContext) -> Iterator[str]:
    """Yields signs that another tokenizer made the tokens: an id is unknown, or a response doesn't decode to
    its text."""
    advice = (
        "it was played by a model with another tokenizer; set pretrain to that one, or play again with "
        "`turnwise rollout`"
    )
    turns = [(trajectory, turn) for trajectory in trajectories for turn in trajectory.turns]
    for trajectory, turn in turns:
        largest = max(int(ids.max(initial=0)) for ids in (turn.prompt_ids, turn.response_ids))
        if largest >= policy.info.vocab_size:
            yield (
                f"{trajectory.task.id} has token {largest}, and the model knows {policy.info.vocab_size}: "
                f"{advice}"
            )
    for trajectory, turn in turns[:_NUM_DECODED]:
        ids = turn.response_ids.tolist()
        decoded = policy.template.decode(ids)
        # The text of a response lacks its stop token, if it has one. Older files lack all special tokens.
        without_stop = policy.template.decode(ids[:-1])
        plain = str(policy.tokenizer.decode(ids, skip_special_tokens=True))
        if turn.text not in (decoded, without_stop, plain):
            yield (
                f"{trajectory.task.id} has a response {turn.text!r} whose tokens say {decoded!r} here: "
                f"{advice}"
            )
