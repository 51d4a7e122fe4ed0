"""Plays tasks with a saved model and trains nothing: evaluation and rollouts."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from turnwise.assemble.rollouts import (
    ServedPolicy,
    agents_of,
    build_pictures,
    build_scheduler,
    open_rollout_context,
    open_served_policy,
    parser_of,
    sampling_params,
    say_warnings,
    scheduler_settings,
)
from turnwise.assemble.run_table import log_settings, play_table
from turnwise.assemble.traces import TracePlace, build_traces, say_untraced
from turnwise.chat.contexts import TokenContexts
from turnwise.config import AgenticConfig, SettingsTable, require, unavailable_to_play
from turnwise.config.show.played_rows import sampling
from turnwise.config.show.step_rows import most_sampled
from turnwise.errors import DataError
from turnwise.examine.algorithm import make_algorithm
from turnwise.examine.examined import Examined
from turnwise.examine.gateway import is_of_gateway
from turnwise.examine.models import call_models
from turnwise.pipelines.collect import Collection
from turnwise.pipelines.evaluate import Evaluation, evaluate
from turnwise.protocols import PolicyServer
from turnwise.rollout.journal import read_journal
from turnwise.rollout.recorded import replay
from turnwise.rollout.recorded_tree import replay_tree
from turnwise.rollout.settings import SchedulerSettings
from turnwise.rollout.turn_journal import is_turn_journal, read_turns
from turnwise.tracking.terminal import progress_on_terminal
from turnwise.types import Group, SamplingParams, Split

Mode = Literal["sampled", "greedy"]
OnStart = Callable[[SettingsTable], None]


def validation_mode(config: AgenticConfig) -> Mode:
    """The mode in which a training run validates."""
    if config.sampling("val").is_greedy:
        return "greedy"
    return "sampled"


def evaluate_model(
    examined: Examined,
    model_path: str | None = None,
    num_tasks: int | None = None,
    on_start: OnStart = log_settings,
) -> Evaluation:
    """Plays the config's validation tasks, or the first `num_tasks`, with its model or the one at
    `model_path`. `on_start` gets the table of settings. Tasks, seeds and schedule are those of validation in
    training: the same weights give the same result."""
    [(_, evaluation)] = evaluate_modes(
        examined, [validation_mode(examined.config)], num_tasks, None, model_path, on_start
    )
    return evaluation


def evaluate_modes(
    examined: Examined,
    modes: Sequence[Mode],
    num_tasks: int | None = None,
    num_samples: int | None = None,
    model_path: str | None = None,
    on_start: OnStart = log_settings,
    on_played: Callable[[Sequence[Group]], None] = lambda groups: None,
    rollouts: Path | None = None,
    first_step: int = 0,
) -> Iterator[tuple[Mode, Evaluation]]:
    """Like `evaluate_model`, once per mode. Plays each task `num_samples` times (default: group size), but
    once if greedy. `on_played` gets the groups of each mode. If these are written to a file, `rollouts`,
    traces lie beside it: a mode is a step, and the first one is `first_step`."""
    config = examined.config
    name = Path(model_path or config.actor_train.model_args.model_name_or_path).name
    num_tasks = num_tasks or config.val_batch_size // config.val_env_manager.group_size
    place = TracePlace.of_played(config, name, rollouts)
    with _saved_policy(examined, "val", model_path, place=place) as policy:
        for step, mode in enumerate(modes, start=first_step):
            pictures = build_pictures(config, "eval")
            settings = _evaluation_settings(config, num_samples, mode)
            scheduler = build_scheduler(
                examined,
                policy,
                "val",
                pictures=pictures,
                settings=settings,
                sampling=_evaluation_sampling(config, mode),
            )
            if mode == modes[0]:
                sampled = ", then ".join(_describe_mode(config, mode) for mode in modes)
                on_start(play_table(config, policy.servers, scheduler, "val", sampled))
            with progress_on_terminal(policy.event_loop.stopwatch, 0) as begin_phase:
                begin_phase(f"{mode} episodes of {name}")
                groups = scheduler.get_batch(num_tasks * settings.group_size)
            folder_name = name
            if mode != validation_mode(config):
                folder_name = f"{name}-{mode}"
            pictures.write(folder_name, groups)
            on_played(groups)
            if policy.traces:
                policy.traces.end_step(step, groups, is_validation=True)
            yield mode, evaluate(groups)


def _evaluation_settings(config: AgenticConfig, num_samples: int | None, mode: Mode) -> SchedulerSettings:
    """Validation's settings with the mode's group size. Its limit of concurrent episodes becomes whole
    groups, at least one."""
    settings = scheduler_settings(config, "val")
    group_size = num_samples or settings.group_size
    if mode == "greedy":
        group_size = 1
    max_concurrent_groups = max(1, settings.num_concurrent_episodes // group_size)
    return replace(settings, group_size=group_size, max_concurrent_groups=max_concurrent_groups)


def _evaluation_sampling(config: AgenticConfig, mode: Mode) -> SamplingParams:
    params = sampling_params(config, "val")
    if mode == "greedy":
        return replace(params, do_sample=False)
    return replace(params, do_sample=True, temperature=params.temperature or 1.0)


def _describe_mode(config: AgenticConfig, mode: Mode) -> str:
    if mode == validation_mode(config):
        return sampling(config, "val")
    if mode == "greedy":
        return mode
    return f"temperature {_evaluation_sampling(config, mode).temperature:g}"


def collect_rollouts(
    examined: Examined,
    collection: Collection,
    split: Split = "train",
    num_batches: int = 1,
    model_path: str | None = None,
    on_start: OnStart = log_settings,
) -> None:
    """Plays batches of a split with a saved model, like the first steps of training or a validation, and
    writes them to the collection. After an error or Ctrl-C, the collection has the groups that ended before
    it."""
    config = examined.config
    needs = frozenset[str]()
    batch_size = config.val_batch_size
    if split == "train":
        needs = make_algorithm(config).needs
        batch_size = config.rollout_batch_size
    place = TracePlace.of_played(config, collection.file.stem, collection.file)
    with _saved_policy(examined, split, model_path, needs, place=place) as policy:
        traces = policy.traces

        def on_played(step: int, groups: Sequence[Group]) -> None:
            if traces:
                traces.end_step(step, groups, is_validation=split == "val")

        settings = scheduler_settings(config, split, needs)
        scheduler = build_scheduler(examined, policy, split, settings=settings)
        on_start(play_table(config, policy.servers, scheduler, split, sampling(config, split)))
        with progress_on_terminal(policy.event_loop.stopwatch, most_sampled(config)) as begin_phase:
            collection.play(scheduler, num_batches, batch_size, begin_phase, on_played)


def replay_rollouts(
    examined: Examined,
    path: Path,
    split: Split = "train",
    model_path: str | None = None,
) -> tuple[int, list[str]]:
    """Replays the trajectories of a `rollouts.jsonl`, or a split's episodes of a `turns.jsonl`, through their
    agents with the recorded tokens and no model. Requests of an agent that sent its whole history with each
    go into a tree again, without the agent. Leaves out failed trajectories. Returns the number of
    trajectories, and sentences about lost turns and errors after the last recorded turn. Raises RolloutError
    at the first difference from the recording."""
    config = examined.config
    say_warnings(examined)
    say_untraced(config)
    lost: list[str] = []
    is_whole = not is_turn_journal(path)
    if is_whole:
        recorded = [trajectory for _, trajectory in read_journal(path) if trajectory.status != "failed"]
    else:
        episodes, lost = read_turns(path)
        recorded = [trajectory for trajectory in episodes if trajectory.task.split == split]
        if not recorded:
            raise DataError("; ".join([f"{path} holds no turn of the split {split} (--split)", *lost]))
    with closing(open_rollout_context(examined, model_path)) as policy:
        template = policy.template
        agents = agents_of(examined, split, policy)

        def contexts(server: PolicyServer, episode_id: str) -> TokenContexts:
            return TokenContexts(
                template, server, config.sequence_length, episode_id, parser_of(config, template)
            )

        for trajectory in recorded:
            sampling = sampling_params(config, split)
            has_requests = all(turn.messages for turn in trajectory.turns)
            is_of_http = is_of_gateway(examined, trajectory.task)
            is_tree = is_of_http or trajectory.answer_turn is not None
            if is_whole and is_tree and has_requests:
                policy.event_loop.run(
                    replay_tree(
                        trajectory,
                        contexts,
                        sampling,
                        config.gateway.match,
                    )
                )
                continue
            if is_of_http:
                raise DataError(
                    f"{path}: {trajectory.task.id} was played over HTTP, and its requests aren't "
                    "in the file, so it can't be replayed; rollouts.jsonl of this version has them"
                )
            error = policy.event_loop.run(replay(trajectory, agents, contexts, sampling, is_whole))
            if error:
                lost.append(error)
    return len(recorded), lost


@contextmanager
def _saved_policy(
    examined: Examined,
    split: Split,
    model_path: str | None,
    needs: frozenset[str] = frozenset(),
    *,
    place: TracePlace,
) -> Iterator[ServedPolicy]:
    require(unavailable_to_play(examined.config, split))
    say_warnings(examined)
    call_models(examined)
    with ExitStack() as endings:
        # Traces are closed last, so that they have the episodes that end with the event loop.
        make_traces = partial(build_traces, examined.config, place, endings)
        policy = open_served_policy(examined, model_path, needs, make_traces)
        endings.callback(policy.close)
        yield policy
