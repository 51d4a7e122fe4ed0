"""`rollouts.jsonl`: every trained-on trajectory, complete enough to train from again, one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from turnwise.errors import DataError
from turnwise.types import FloatArray, Group, Task, Trajectory, Turn, VersionRun


class Journal:
    """Appends trajectories to a file, flushed once a step so that a crash loses at most the step in hand."""

    def __init__(self, path: Path) -> None:
        self._file: TextIO = path.open("a", encoding="utf-8")

    def append(self, step: int, groups: Iterable[Group]) -> None:
        """Writes the trajectories of one step, with their advantages where credit was given."""
        for group in groups:
            for trajectory in group.trajectories:
                record = {"step": step, "group": group.index, **encode_trajectory(trajectory)}
                self._file.write(json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def encode_trajectory(trajectory: Trajectory) -> dict[str, Any]:
    """The JSON form of one trajectory. `decode_trajectory` is its inverse but for media, and for state keys that are neither
    text nor a number: those come back as their `repr`, which tells them apart as well."""
    task = trajectory.task
    advantages = _advantages_by_turn(trajectory)
    return {
        "task": {
            "id": task.id,
            "tag": task.tag,
            "split": task.split,
            "seed": task.seed,
            "epoch": task.epoch,
            "payload": dict(task.payload),
        },
        "sibling": trajectory.sibling,
        "status": trajectory.status,
        "limit": trajectory.limit,
        "score": trajectory.score,
        "outcome_rewards": trajectory.outcome_rewards,
        "metrics": trajectory.metrics,
        "error": trajectory.error,
        "role": trajectory.role,
        "weight": trajectory.weight,
        "turns": [_encode_turn(turn, advantages.get(i)) for i, turn in enumerate(trajectory.turns)],
    }


def _encode_turn(turn: Turn, advantages: FloatArray | None) -> dict[str, Any]:
    record: dict[str, Any] = {
        "observation": turn.observation,
        "text": turn.text,
        "action": turn.action,
        "reward": turn.reward,
        "finish_reason": turn.finish_reason,
        "prompt_ids": turn.prompt_ids.tolist(),
        "response_ids": turn.response_ids.tolist(),
        # Nine significant digits give a float32 back exactly.
        "logprobs": [float(f"{x:.9g}") for x in turn.logprobs],
        "versions": [list(run) for run in turn.versions],
        "metrics": turn.metrics,
        "state_key": turn.state_key if isinstance(turn.state_key, str | int | None) else repr(turn.state_key),
        "starts_context": turn.starts_context,
        "parent": turn.parent,
        "is_greedy": turn.is_greedy,
        "generate_s": round(turn.generate_s, 6),
        "step_s": round(turn.step_s, 6),
    }
    if advantages is not None:
        # One number where all tokens of the turn share it, as with every trajectory- or turn-level estimator.
        is_constant = len(advantages) > 0 and bool((advantages == advantages[0]).all())
        record["advantage"] = float(advantages[0]) if is_constant else [float(a) for a in advantages]
    return record


def _advantages_by_turn(trajectory: Trajectory) -> dict[int, FloatArray]:
    return {
        span.turn: sample.advantages[span.start : span.stop]
        for sample in trajectory.samples
        if sample.advantages is not None
        for span in sample.turn_spans
    }


def decode_trajectory(record: dict[str, Any]) -> Trajectory:
    """The trajectory of one line, without samples (`batching.samples.build_samples` makes them)."""
    turns = [
        Turn(
            prompt_ids=np.array(t["prompt_ids"], dtype=np.int64),
            response_ids=np.array(t["response_ids"], dtype=np.int64),
            logprobs=np.array(t["logprobs"], dtype=np.float32),
            versions=tuple(VersionRun(*run) for run in t["versions"]),
            finish_reason=t["finish_reason"],
            text=t["text"],
            observation=t["observation"],
            action=t["action"],
            reward=t["reward"],
            state_key=t["state_key"],
            metrics=t["metrics"],
            starts_context=t["starts_context"],
            parent=t["parent"],
            is_greedy=t["is_greedy"],
            generate_s=t["generate_s"],
            step_s=t["step_s"],
        )
        for t in record["turns"]
    ]
    return Trajectory(
        task=Task(**record["task"]),
        sibling=record["sibling"],
        turns=turns,
        status=record["status"],
        limit=record["limit"],
        outcome_rewards=record["outcome_rewards"],
        metrics=record["metrics"],
        error=record["error"],
        role=record["role"],
        weight=record["weight"],
    )


def read_journal(path: Path) -> Sequence[tuple[int, Trajectory]]:
    """`(step, trajectory)` of every line.

    Raises:
        DataError: a line that is cut or isn't a trajectory, by its number.
    """
    rows = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
                rows.append((int(record["step"]), decode_trajectory(record)))
            except (ValueError, KeyError, TypeError) as fault:
                raise DataError(
                    f"{path}, line {number}: not a trajectory ({fault}); was the file cut in the middle?"
                ) from fault
    return rows
