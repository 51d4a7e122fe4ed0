"""The simulation of `reach.py` beside real runs of two replicas: is it right about utilisation and staleness?

    python benchmarks/reach_real.py [--runs 5] [--steps 8]

A run trains asynchronously on a lake of always eight turns: the trainer and two replicas with an embedded
engine are processes. What it shows of its service times is given to the simulation: seconds of an engine's
step by the number of requests that it had, lengths of responses, the seconds between two turns of a
conversation, and those between one batch and the asking for the next. `utilisation` is the share of its best
rate at which an engine decodes, `busy` the share of time in which it has a request, `staleness` the mean age
of the trained turns in versions. The differences are medians of the runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from machine import describe_machine
from reach import GROUP_SIZE, RATIO, simulate, turns_of
from simulated_engine import EngineTimes
from toy import parse_arguments

from turnwise.assemble.agentic import build_agentic
from turnwise.assemble.run import start_run
from turnwise.config import parse_config
from turnwise.examine.examined import examine
from turnwise.models.make import make_model
from turnwise.types import Group

EXAMPLE = Path(__file__).parent.parent / "examples" / "frozen_lake" / "agentic.yaml"
NUM_REPLICAS = 2
COMPARED = ("utilisation", "busy", "staleness_mean")
RATIOS = np.linspace(0.0, 0.5, 101)
"""Candidates of `EngineTimes.token_s` over `EngineTimes.step_s`."""


class Call(NamedTuple):
    """A request, with the instants of its start and end."""

    start: float
    end: float
    num_tokens: int
    conversation: str


@dataclass(slots=True)
class Recorder:
    """What a run does, in seconds of one clock."""

    calls: list[list[Call]] = field(default_factory=list)
    """For each replica."""
    batches: list[tuple[float, float]] = field(default_factory=list)
    """When a batch was asked for, and when it was complete."""
    ages: list[int] = field(default_factory=list)
    """The age of each trained turn, in versions."""
    end: float = 0.0

    def watch_server(self, server: Any) -> None:
        """Notes the requests of a server."""
        generate: Callable[..., Any] = server.generate
        calls: list[Call] = []
        self.calls.append(calls)

        async def noted(
            prompt: Any, sampling: Any, conversation: str, *arguments: Any, **options: Any
        ) -> Any:
            started = time.perf_counter()
            completion = await generate(prompt, sampling, conversation, *arguments, **options)
            calls.append(Call(started, time.perf_counter(), len(completion.token_ids), conversation))
            return completion

        server.generate = noted

    def watch_source(self, source: Any) -> None:
        """Notes the batches of a scheduler, whose policy has a version more at each."""
        parts: Callable[..., Any] = source.parts

        def noted(*arguments: Any) -> Any:
            started = time.perf_counter()
            for part in parts(*arguments):
                self._note(part.groups, started)
                yield part

        source.parts = noted

    def _note(self, groups: Sequence[Group], started: float) -> None:
        version = len(self.batches)
        self.ages += [version - run.version for turn in turns_of(groups) for run in turn.versions]
        self.batches.append((started, time.perf_counter()))

    @property
    def training_s(self) -> list[float]:
        """Seconds from each batch to the asking for the next, or to the end."""
        asked = [started for started, _ in self.batches[1:]] + [self.end]
        return [later - complete for later, (_, complete) in zip(asked, self.batches, strict=True)]


def train(model: Path, folder: Path, conversations: int, num_steps: int) -> Recorder:
    """A run with so many conversations a replica at once. A batch has a quarter of all, as in `simulate`."""
    num_groups = NUM_REPLICAS * conversations // GROUP_SIZE
    values = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    values["custom_envs"] = {"Lake": {"env_type": "scale:LakeEnv", "max_steps": 8, "max_tokens_per_step": 24}}
    values["custom_envs"]["Lake"]["action_pattern"] = None
    values["train_env_manager"] = {"num_env_groups": num_groups, "group_size": GROUP_SIZE}
    values["actor_train"]["device_mapping"] = [0]
    values |= {
        "output_dir": str(folder),
        "pretrain": str(model),
        "max_steps": num_steps,
        "eval_steps": 0,
        "track_with": [],
        "sequence_length": 2048,
        "rollout_batch_size": max(1, num_groups // 4) * GROUP_SIZE,
        "async_generation_ratio": RATIO,
        "stream_training": False,
        "num_gpus_per_node": 1 + NUM_REPLICAS,
        "actor_infer": {"device_mapping": [1, 2]},
        "cluster": {"name": "process"},
    }
    recorder = Recorder()
    config = parse_config(values)[0]
    pipeline = build_agentic(examine(config), start_run(config), is_quiet=True)
    try:
        for server in pipeline.actor_infer.servers:
            recorder.watch_server(server)
        recorder.watch_source(pipeline.train_rollout_scheduler)
        pipeline.run()
        recorder.end = time.perf_counter()
    finally:
        pipeline.close()
    return recorder


def service_times(recorder: Recorder, conversations: int) -> EngineTimes:
    """The times of an engine's step that explain best how long the requests took."""
    lengths = np.array([call.num_tokens for calls in recorder.calls for call in calls], float)
    best = (float("inf"), 0.0, 0.0)
    for ratio in RATIOS:
        shares = np.concatenate([shared_seconds(calls, float(ratio)) for calls in recorder.calls])
        step_s = float(shares.sum() / lengths.sum())
        error = float(((shares / step_s - lengths) ** 2).sum())
        best = min(best, (error, step_s, float(ratio) * step_s))
    _, step_s, token_s = best
    return EngineTimes(
        step_s,
        token_s,
        prompt_s=0.0,
        max_running=conversations,
        mean_tokens=float(lengths.mean()),
        sigma=float(np.log(lengths).std()),
        between_s=seconds_between(recorder.calls),
    )


def seconds_between(replicas: Sequence[Sequence[Call]]) -> float:
    """The mean time from a response to the next request of its conversation."""
    gaps: list[float] = []
    for calls in replicas:
        ends: dict[str, float] = {}
        for call in sorted(calls):
            if call.conversation in ends:
                gaps.append(call.start - ends[call.conversation])
            ends[call.conversation] = call.end
    return statistics.mean(gaps)


def shared_seconds(calls: Sequence[Call], ratio: float) -> np.ndarray:
    """float64 [number of calls]: ∫ dt / (1 + ratio × (n − 1)) over each call, where n requests run at t."""
    starts = np.array([call.start for call in calls])
    ends = np.array([call.end for call in calls])
    instants = np.sort(np.concatenate([starts, ends]))
    middles = (instants[1:] + instants[:-1]) / 2
    begun = np.searchsorted(np.sort(starts), middles)
    num_running = begun - np.searchsorted(np.sort(ends), middles)
    pieces = np.diff(instants) / (1.0 + ratio * np.maximum(num_running - 1, 0))
    total = np.concatenate([[0.0], np.cumsum(pieces)])
    return total[np.searchsorted(instants, ends)] - total[np.searchsorted(instants, starts)]


def measured(recorder: Recorder, times: EngineTimes) -> dict[str, float]:
    """What `simulate` tells of a simulated run."""
    began = recorder.batches[0][0]
    elapsed_s = recorder.end - began
    tokens = [sum(call.num_tokens for call in calls) for calls in recorder.calls]
    busy = [covered_seconds(calls, recorder.end) for calls in recorder.calls]
    return {
        "utilisation": statistics.mean(tokens) / (elapsed_s * times.tokens_a_second),
        "busy": statistics.mean(busy) / elapsed_s,
        "staleness_mean": statistics.mean(recorder.ages),
    }


def covered_seconds(calls: Sequence[Call], end: float) -> float:
    """Seconds until `end` in which at least one request runs."""
    covered = 0.0
    latest = 0.0
    for call in sorted(calls):
        covered += max(0.0, min(call.end, end) - max(call.start, latest))
        latest = max(latest, call.end)
    return covered


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--conversations", type=int, default=32, help="at once, for each replica")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "reach_real.json")
    options = parse_arguments(parser, runs=1, steps=2, conversations=16)
    rows: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = make_model("tiny", folder / "model", [EXAMPLE.read_text(encoding="utf-8")], seed=0).folder
        for _ in range(options.runs):
            recorder = train(model, folder / "runs", options.conversations, options.steps)
            times = service_times(recorder, options.conversations)
            simulated = simulate(NUM_REPLICAS, options.conversations, times, recorder.training_s)
            real = measured(recorder, times)
            row = {
                "real": {name: round(real[name], 3) for name in COMPARED},
                "simulated": {name: round(simulated[name], 3) for name in COMPARED},
                "times": {name: round(getattr(times, name), 5) for name in times.__slots__},
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
            write(rows, options)


def write(rows: list[dict[str, dict[str, float]]], options: argparse.Namespace) -> None:
    """Writes the runs so far, and how far the simulation is from them."""
    differences: dict[str, float] = {}
    for name in COMPARED:
        distances = [abs(row["real"][name] - row["simulated"][name]) for row in rows]
        differences[name] = round(statistics.median(distances), 3)
    result = {
        "median_difference": differences,
        "runs": rows,
        "conversations_a_replica": options.conversations,
        "load_average": round(os.getloadavg()[1], 1),
        "machine": describe_machine(),
    }
    options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
