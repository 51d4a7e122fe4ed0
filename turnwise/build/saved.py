"""Plays with a saved model without training: evaluation and rollouts."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from turnwise.build.agentic import build_algorithm
from turnwise.build.rollouts import (
    Agents,
    ServedPolicy,
    build_pictures,
    build_scheduler,
    check_rollouts,
    open_policy,
    open_served_policy,
    parser_of,
    sampling_params,
    scheduler_settings,
)
from turnwise.build.rows import call_models
from turnwise.build.run_table import applied_play, log_applied
from turnwise.chat.conversation import TokenContexts
from turnwise.config import AgenticConfig, Applied, require, unavailable_to_play
from turnwise.config.describe import most_sampled, sampling
from turnwise.errors import DataError
from turnwise.pipelines.collect import Collection
from turnwise.pipelines.evaluate import Evaluation, evaluate
from turnwise.protocols import PolicyServer
from turnwise.rollout.journal import read_journal
from turnwise.rollout.recorded import replay
from turnwise.rollout.settings import SchedulerSettings
from turnwise.rollout.turn_journal import is_turn_journal, read_turns
from turnwise.tracking.terminal import progress_on_terminal
from turnwise.types import SamplingParams, Split

Mode = Literal["sampled", "greedy"]
OnStart = Callable[[Applied], None]


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """How `turnwise eval` plays: the first `num_tasks` validation tasks (None = as many as in a validation), each `num_samples`
    times (None = val_env_manager.group_size) when sampling and once when greedy."""

    modes: Sequence[Mode]
    num_tasks: int | None = None
    num_samples: int | None = None


def validation_mode(config: AgenticConfig) -> Mode:
    """How validation in training plays."""
    return "greedy" if config.sampling("val").is_greedy else "sampled"


def evaluate_model(
    config: AgenticConfig, model_path: str | None = None, num_tasks: int | None = None, on_start: OnStart = log_applied
) -> Evaluation:
    """Plays the config's validation tasks (the first `num_tasks`) with a saved model. `on_start` gets the table of settings.
    Tasks, seeds and schedule are those of validation in training, so the same weights give the same result."""
    plan = EvaluationPlan([validation_mode(config)], num_tasks)
    [(_, evaluation)] = evaluate_modes(config, plan, model_path, on_start)
    return evaluation


def evaluate_modes(
    config: AgenticConfig, plan: EvaluationPlan, model_path: str | None = None, on_start: OnStart = log_applied
) -> Iterator[tuple[Mode, Evaluation]]:
    """Evaluates with each mode of the plan, one after the other."""
    name = Path(model_path or config.actor_train.model_args.model_name_or_path).name
    with _saved_policy(config, "val", model_path) as policy:
        for mode in plan.modes:
            is_own = mode == validation_mode(config)
            pictures = build_pictures(config, "eval")
            settings = _evaluation_settings(config, plan, mode)
            drawn = _evaluation_sampling(config, mode)
            scheduler = build_scheduler(config, policy, "val", pictures=pictures, settings=settings, sampling=drawn)
            if mode == plan.modes[0]:
                how = ", then ".join(_how(config, mode) for mode in plan.modes)
                on_start(applied_play(config, policy.servers, scheduler, "val", how))
            num_tasks = plan.num_tasks or config.val_batch_size // config.val_env_manager.group_size
            with progress_on_terminal(policy.stopwatch, 0) as begin_phase:
                begin_phase(f"{mode} episodes of {name}")
                groups = scheduler.get_batch(num_tasks * settings.group_size)
            pictures.write(name if is_own else f"{name}-{mode}", groups)
            yield mode, evaluate(groups)


def _evaluation_settings(config: AgenticConfig, plan: EvaluationPlan, mode: Mode) -> SchedulerSettings:
    """The settings of validation with the plan's number of siblings. About as many episodes run at once as in validation."""
    own = scheduler_settings(config, "val")
    group_size = 1 if mode == "greedy" else plan.num_samples or own.group_size
    return replace(own, group_size=group_size, max_concurrent_groups=max(1, own.num_concurrent_episodes // group_size))


def _evaluation_sampling(config: AgenticConfig, mode: Mode) -> SamplingParams:
    own = sampling_params(config, "val")
    if mode == "greedy":
        return replace(own, do_sample=False)
    return replace(own, do_sample=True, temperature=own.temperature or 1.0)


def _how(config: AgenticConfig, mode: Mode) -> str:
    if mode == validation_mode(config):
        return sampling(config, "val")
    return mode if mode == "greedy" else f"temperature {_evaluation_sampling(config, mode).temperature:g}"


def collect_rollouts(
    config: AgenticConfig,
    collection: Collection,
    split: Split = "train",
    num_batches: int = 1,
    model_path: str | None = None,
    on_start: OnStart = log_applied,
) -> None:
    """Plays batches of a split with a saved model, as training's first step or a validation would. After an error or Ctrl-C the
    collection holds the groups played so far."""
    needs = build_algorithm(config).needs if split == "train" else frozenset[str]()
    size = config.rollout_batch_size if split == "train" else config.val_batch_size
    with _saved_policy(config, split, model_path, needs) as policy:
        scheduler = build_scheduler(config, policy, split, settings=scheduler_settings(config, split, needs))
        on_start(applied_play(config, policy.servers, scheduler, split, sampling(config, split)))
        with progress_on_terminal(policy.stopwatch, most_sampled(config)) as begin_phase:
            collection.play(scheduler, num_batches, size, begin_phase)


def replay_rollouts(
    config: AgenticConfig, path: Path, split: Split = "train", model_path: str | None = None
) -> tuple[int, list[str]]:
    """Replays the trajectories of a `rollouts.jsonl`, or the episodes of a split in a `turns.jsonl`, through their agents with
    the recorded tokens. Returns the number of trajectories, and sentences about lost turns and about what went wrong after the
    last recorded turn. Failed trajectories are left out. No model is loaded."""
    check_rollouts(config)
    policy = open_policy(config, model_path)

    def contexts(server: PolicyServer, episode_id: str) -> TokenContexts:
        return TokenContexts(policy.template, server, config.sequence_length, episode_id, parser_of(config, policy.template))

    agents, is_whole, losses = Agents(config, split, policy, pictures=None), not is_turn_journal(path), list[str]()
    try:
        if is_whole:
            recorded = [trajectory for _, trajectory in read_journal(path) if trajectory.status != "failed"]
        else:
            episodes, losses = read_turns(path)
            recorded = [trajectory for trajectory in episodes if trajectory.task.split == split]
            if not recorded:
                raise DataError("; ".join([f"{path} holds no turn of the split {split} (--split)", *losses]))
        for trajectory in recorded:
            played = replay(trajectory, agents, contexts, sampling_params(config, split), is_whole)
            losses += filter(None, [policy.event_loop.run(played)])
    finally:
        policy.close()
    return len(recorded), losses


@contextmanager
def _saved_policy(
    config: AgenticConfig, split: Split, model_path: str | None, needs: frozenset[str] = frozenset()
) -> Iterator[ServedPolicy]:
    require(unavailable_to_play(config, split))
    check_rollouts(config)
    call_models(config)
    policy = open_served_policy(config, model_path, needs)
    try:
        yield policy
    finally:
        policy.close()
