"""`rollouts.jsonl`: every trajectory that was played, complete enough to train from again, one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np

from turnwise.batching.samples import build_samples
from turnwise.errors import DataError
from turnwise.rollout.source import Rejection, played_of
from turnwise.types import FloatArray, Group, Task, Trajectory, Turn, VersionRun


class Journal:
    """Appends trajectories to a file, flushed once a step so that a crash loses at most the step in hand."""

    def __init__(self, path: Path) -> None:
        self._file: TextIO = path.open("a", encoding="utf-8")

    def append(self, step: int, groups: Iterable[Group]) -> None:
        """Writes the trajectories of one step, with their advantages where credit was given; those of a group, its greedy one
        last, stand one after the other."""
        for group in groups:
            of_group = {"step": step, "group": group.index, "group_length": len(played_of(group)), "rejected": group.rejected}
            for trajectory in played_of(group):
                record = {**of_group, "is_baseline": trajectory is group.greedy, **encode_trajectory(trajectory)}
                self._file.write(json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def encode_group(group: Group) -> dict[str, Any]:
    """The JSON form of one group, for a checkpoint."""
    trajectories = [encode_trajectory(trajectory) for trajectory in played_of(group)]
    of_group = {"index": group.index, "rejected": group.rejected, "has_greedy": group.greedy is not None}
    return {"task": _encode_task(group.task), **of_group, "trajectories": trajectories}


def decode_group(record: dict[str, Any]) -> Group:
    """The group of `encode_group`, with its samples."""
    trajectories = [decode_trajectory(trajectory) for trajectory in record["trajectories"]]
    for trajectory in trajectories:
        trajectory.samples = build_samples(trajectory)
    greedy = trajectories.pop() if record["has_greedy"] else None
    return Group(Task(**record["task"]), trajectories, record["index"], greedy, record["rejected"])


def encode_trajectory(trajectory: Trajectory) -> dict[str, Any]:
    """The JSON form of one trajectory. `decode_trajectory` is its inverse but for media, and for state keys that are neither
    text nor a number: those come back as their `repr`, which tells them apart as well."""
    advantages = _advantages_by_turn(trajectory)
    return {
        "task": _encode_task(trajectory.task),
        "sibling": trajectory.sibling,
        "status": trajectory.status,
        "limit": trajectory.limit,
        "score": trajectory.score,
        "score_kl_penalty": trajectory.score_kl_penalty,
        "outcome_rewards": trajectory.outcome_rewards,
        "metrics": trajectory.metrics,
        "error": trajectory.error,
        "role": trajectory.role,
        "weight": trajectory.weight,
        "turns": [_encode_turn(turn, advantages.get(i)) for i, turn in enumerate(trajectory.turns)],
    }


def _encode_task(task: Task) -> dict[str, Any]:
    return {
        "id": task.id,
        "tag": task.tag,
        "split": task.split,
        "seed": task.seed,
        "epoch": task.epoch,
        "payload": dict(task.payload),
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
    """The trajectory of one line, without samples (`batching.samples.build_samples` makes them).

    Raises:
        ValueError, KeyError, TypeError, AttributeError: it is none.
    """
    return Trajectory(
        task=Task(**record["task"]),
        sibling=record["sibling"],
        turns=[_decode_turn(turn) for turn in record["turns"]],
        status=record["status"],
        limit=record["limit"],
        outcome_rewards=record["outcome_rewards"],
        metrics=record["metrics"],
        error=record["error"],
        role=record["role"],
        weight=record["weight"],
        score_kl_penalty=record["score_kl_penalty"],
    )


def _decode_turn(record: dict[str, Any]) -> Turn:
    turn = Turn(
        prompt_ids=np.array(record["prompt_ids"], dtype=np.int64),
        response_ids=np.array(record["response_ids"], dtype=np.int64),
        logprobs=np.array(record["logprobs"], dtype=np.float32),
        versions=tuple(VersionRun(*run) for run in record["versions"]),
        finish_reason=record["finish_reason"],
        text=record["text"],
        observation=record["observation"],
        action=record["action"],
        reward=record["reward"],
        state_key=record["state_key"],
        metrics=record["metrics"],
        starts_context=record["starts_context"],
        parent=record["parent"],
        is_greedy=record["is_greedy"],
        generate_s=record["generate_s"],
        step_s=record["step_s"],
    )
    num_sampled, num_versions = len(turn.response_ids), sum(run.num_tokens for run in turn.versions)
    if not num_sampled == len(turn.logprobs) == num_versions:
        raise ValueError(f"{num_sampled} sampled tokens, {len(turn.logprobs)} log-probs, versions of {num_versions}")
    return turn


class Place(NamedTuple):
    """Where a trajectory belongs: `group_length` lines of one group stand one after the other."""

    step: int
    group: int
    group_length: int
    rejected: Rejection | None
    is_baseline: bool

    @classmethod
    def of(cls, record: dict[str, Any]) -> Place:
        return cls(**{name: record[name] for name in cls._fields})


class Line(NamedTuple):
    """One line of a journal: what it holds, or what is wrong with it."""

    number: int
    content: tuple[Place, Trajectory] | None
    fault: str = ""


def read_lines(path: Path) -> Iterator[Line]:
    """Every line of a journal, readable or not.

    Raises:
        DataError: there is no such file.
    """
    if not path.is_file():
        found = "is a folder; name the rollouts.jsonl in it" if path.is_dir() else "there is no such file"
        raise DataError(f"{path}: {found}")
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
                content = Place.of(record), decode_trajectory(record)
            except (ValueError, KeyError, TypeError, AttributeError) as fault:
                yield Line(number, None, f"{type(fault).__name__}: {fault}")
            else:
                yield Line(number, content)


def read_journal(path: Path) -> Sequence[tuple[int, Trajectory]]:
    """`(step, trajectory)` of every line. `replay.read_groups` is for files that may be damaged.

    Raises:
        DataError: there is no such file, or a line, by its number, is cut or isn't a trajectory.
    """
    rows = []
    for number, content, fault in read_lines(path):
        if content is None:
            raise DataError(f"{path}, line {number}: not a trajectory ({fault}); was the file cut in the middle?")
        place, trajectory = content
        rows.append((place.step, trajectory))
    return rows
