"""Builds the traces of a run, and wraps what they hear: agents and reward functions."""

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from turnwise.config import AgenticConfig
from turnwise.data.rewards import RewardManager, runs_of
from turnwise.lifecycle.run_folder import RunFolder
from turnwise.protocols import AgentLoop, Reward, RewardResult
from turnwise.rollout.observed import ObservedLoop
from turnwise.tracking.mlflow_traces import MlflowTraces
from turnwise.tracking.spans import Decode
from turnwise.tracking.store import TrackedRun, tracker_arguments
from turnwise.tracking.traces import OpenStore, Traces, TraceSettings
from turnwise.tracking.traces_file import TracesFile, traces_beside
from turnwise.types import Group, Task

logger = logging.getLogger(__name__)

MakeTraces = Callable[[PreTrainedTokenizerBase], Traces | None]
"""Makes the traces of a run, given the policy's tokenizer; None if nothing is traced."""


def no_traces(tokenizer: PreTrainedTokenizerBase) -> None:
    """Makes no traces."""


@dataclass(frozen=True, slots=True)
class TracePlace:
    """Where the traces of a run go."""

    name: str
    """The tag `run`."""
    file: Path | None
    """The file of `trace.backend: jsonl`; None if the command keeps no files."""
    folder: Path
    """The run's folder; by default MLflow's database lies beside it."""

    @classmethod
    def of_run(cls, folder: RunFolder) -> "TracePlace":
        """The place of a run of `turnwise train`."""
        return cls(folder.path.name, folder.traces, folder.path)

    @classmethod
    def of_played(cls, config: AgenticConfig, name: str, rollouts: Path | None) -> "TracePlace":
        """The place of a command that plays, whose trajectories go to the file `rollouts`, if it keeps
        them."""
        file = None
        if rollouts is not None:
            file = traces_beside(rollouts)
        return cls(name, file, Path(config.output_dir).absolute() / config.exp_name / name)


def say_untraced(config: AgenticConfig) -> None:
    """Warns, where nothing is traced, that `trace.backend` has no effect."""
    if config.trace.backend:
        logger.warning(
            "trace.backend %s has no effect here: `turnwise train`, `turnwise rollout` and `turnwise eval "
            "--rollouts FILE` write traces",
            config.trace.backend,
        )


def build_traces(
    config: AgenticConfig, place: TracePlace, endings: ExitStack, tokenizer: PreTrainedTokenizerBase
) -> Traces | None:
    """The traces that `trace` asks for, which `endings` close; None if `trace.backend` is unset, or is jsonl
    and there is no place for a file."""
    trace = config.trace
    if trace.backend is None:
        return None
    if trace.backend == "jsonl" and place.file is None:
        say_untraced(config)
        return None
    decode: Decode | None = None
    if trace.token2text:
        decode = partial(_decoded, tokenizer)
    settings = TraceSettings(
        max_tasks=trace.max_samples_per_step,
        max_pending_bytes=trace.max_pending_mb * 1_000_000,
        seed=config.seed,
    )
    tags = {"run": place.name, "experiment_name": config.exp_name}
    traces = Traces(_opener(config, place, decode), settings, tags)
    endings.callback(traces.close)
    return traces


def _opener(config: AgenticConfig, place: TracePlace, decode: Decode | None) -> OpenStore:
    if config.trace.backend == "jsonl" and place.file is not None:
        return partial(TracesFile, place.file, config.trace.max_mb * 1_000_000, decode)
    run = TrackedRun(place.folder, config.exp_name, place.name)
    arguments = tracker_arguments(config.tracker_kwargs, "mlflow")
    places = {key: arguments.get(key) for key in ("tracking_uri", "experiment_name", "artifact_location")}
    return partial(MlflowTraces, run, decode, **places)


def _decoded(tokenizer: PreTrainedTokenizerBase, token_ids: Any) -> str:
    return str(tokenizer.decode(token_ids, skip_special_tokens=False))


def traced_agents(agents: Callable[[Task], AgentLoop], traces: Traces) -> Callable[[Task], AgentLoop]:
    """Wraps `agents`, which returns a task's agent, so that all episodes of the agents are traced."""
    return lambda task: ObservedLoop(agents(task), traces.observe)


def traced_score(score: RewardManager | None, traces: Traces) -> RewardManager | None:
    """The manager, each of whose rewards is a span in the episodes that it scores."""
    if score is None:
        return None
    rewards = [
        replace(weighted, reward=_TracedReward(weighted.name, weighted.reward, traces))
        for weighted in score.rewards
    ]
    return replace(score, rewards=rewards)


@dataclass(frozen=True, slots=True)
class _TracedReward:
    """A reward that tells the traces of a group what it has scored."""

    name: str
    reward: Reward
    traces: Traces

    async def __call__(self, group: Group) -> RewardResult:
        started = time.time_ns()
        result: RewardResult | None = None
        try:
            result = await self.reward(group)
            return result
        finally:
            scores: dict[int, float | None] = {}
            runs = runs_of(group)
            values = [None] * len(runs) if result is None else result.scores
            for run, value in zip(runs, values, strict=False):
                scores |= {id(trajectory): value for trajectory in run}
            self.traces.add_reward(group, self.name, (started, time.time_ns()), scores)
