"""Checks a parsed line of `rollouts.jsonl` without making a trajectory of it."""

import math
from typing import Any, TypeGuard

from pydantic import ValidationError
from pydantic_core import to_json

from turnwise.rollout.record import TrajectoryRecord, first_fault


def check_record(record: Any, has_checked_tokens: bool = False) -> None:
    """Raises what `read_record` raises for the line of this JSON object. Makes no trajectory, and looks at
    lists of tokens apart from the other fields, which costs a fraction. With `has_checked_tokens` only their
    numbers count."""
    shortened = record
    if isinstance(record, dict) and isinstance(record.get("turns"), list):
        shortened = {**record, "turns": [_shortened(turn, has_checked_tokens) for turn in record["turns"]]}
    try:
        TrajectoryRecord.model_validate_json(to_json(shortened))
    except ValidationError as error:
        raise ValueError(first_fault(error)) from error


def _shortened(turn: Any, has_checked_tokens: bool) -> Any:
    """The turn with one token in place of all that it has sampled, and none in place of its prompt. It is
    returned as it is if these aren't what they must be, or `kept_ids` has to fit to them."""
    if not isinstance(turn, dict) or turn.get("kept_ids") is not None:
        return turn
    sampled = turn.get("response_ids")
    logprobs = turn.get("logprobs")
    if not has_checked_tokens:
        has_checked_tokens = are_ids(turn.get("prompt_ids")) and are_ids(sampled) and are_finite(logprobs)
    if not has_checked_tokens or sampled is None or logprobs is None:
        return turn
    if not len(sampled) == len(logprobs) == _num_of_versions(turn.get("versions")):
        return turn
    num_kept = min(len(sampled), 1)
    zeros = [0] * num_kept
    return {
        **turn,
        "prompt_ids": [],
        "response_ids": zeros,
        "logprobs": zeros,
        "versions": [[0, 1]] * num_kept,
    }


def _num_of_versions(versions: Any) -> int | None:
    """The number of tokens of runs `[version, tokens]`; None if these aren't runs."""
    if not isinstance(versions, list):
        return None
    if not all(isinstance(run, list) and list(map(type, run)) == [int, int] for run in versions):
        return None
    return sum(num_tokens for _, num_tokens in versions)


def are_ids(values: Any) -> TypeGuard[list[int]]:
    """Whether this is a list of ids of tokens."""
    if not isinstance(values, list) or not set(map(type, values)) <= {int}:
        return False
    return not values or (min(values) >= 0 and max(values) < 2**31)


def are_finite(values: Any) -> TypeGuard[list[float]]:
    """Whether this is a list of finite numbers."""
    if not isinstance(values, list) or not set(map(type, values)) <= {int, float}:
        return False
    return math.isfinite(sum(values))
