"""Writes the lines of `rollouts.jsonl` as OpenEnv's `TrainingTrace` (schema version 1), and reads them again.

A file has one TrainingTrace a line, one a trajectory:

    {"schema_version": 1, "turns": [{"node_id": "train/Lake/7/0/1", "prompt_token_ids": [5, 6, 7],
      "completion_token_ids": [8, 9], "per_token_logps": [-0.1, -0.2], "loss_mask": [0, 0, 0, 1, 1],
      "request": {"messages": […]}, "response": {"choices": […]}, "metadata": {"reward": 1.0, …}}]}

The prompt of a turn is whole. The schema allows fields of others in a turn's `metadata` only: ours are in
`metadata.turnwise`, and with them a line is read as it was."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic_core import from_json, to_json

from turnwise.errors import DataError
from turnwise.rollout.foreign_trace import check_ids, checked_turn
from turnwise.rollout.record_check import check_record

SCHEMA_VERSION = 1

Json = dict[str, Any]

_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_SMALL = re.compile(r"(?<![\d.])-?(?:0\.0000\d+|\d+(?:\.\d+)?e[+-]\d+)")
_TOKENS = ("prompt_ids", "response_ids", "logprobs")
"""Fields of a turn that TrainingTrace has too. They are null among ours, in their place."""


def written_traces(lines: Iterable[tuple[str, bytes]]) -> Iterator[bytes]:
    """The lines of TrainingTraces for those of a `rollouts.jsonl`.

    Args:
        lines: `(place, line)`; the place is for messages.

    A trajectory without turns has no place in the schema: the next one carries its record, or the last one.
    Raises DataError for a line that `rollout.record` didn't write, or if no line has turns.
    """
    without_turns: list[Json] = []
    held: Json | None = None  # the newest trace, until it is known that none is after it
    is_empty = True
    for place, line in lines:
        try:
            record = from_json(line)
            check_record(record)
        except ValueError as fault:
            raise DataError(f"{place}: not a trajectory ({fault})") from fault
        is_empty = False
        if not record["turns"]:
            without_turns.append(record)
            continue
        if held is not None:
            yield to_json(held)
        held = _trace_of(record)
        if without_turns:
            held["turns"][0]["metadata"]["turnwise"]["before"] = without_turns
            without_turns = []
    if held is None:
        reason = "it is empty" if is_empty else "no trajectory in it has a turn"
        raise DataError(f"there is nothing to convert: {reason}")
    if without_turns:
        held["turns"][0]["metadata"]["turnwise"]["after"] = without_turns
    yield to_json(held)


def _written_record(record: Mapping[str, Any]) -> bytes:
    """The line of a record, as `rollout.record` writes it."""
    texts = {"turns": f"[{','.join(map(_written_turn, record['turns']))}]"}
    fields = [f"{_JSON.encode(name)}:{texts.get(name) or _JSON.encode(record[name])}" for name in record]
    return f"{{{','.join(fields)}}}".encode()


def _written_turn(turn: Mapping[str, Any]) -> str:
    """Tokens are most of what a line costs, and pydantic writes them many times faster than `json`. Its form
    is another one for small numbers."""
    tokens = to_json({name: turn[name] for name in _TOKENS}).decode()
    if "e-" in tokens or "0.0000" in tokens:
        tokens = _SMALL.sub(lambda found: repr(float(found[0])), tokens)
    names = list(turn)
    place = names.index(_TOKENS[0])
    behind = place + len(_TOKENS)
    if tuple(names[place:behind]) != _TOKENS:
        return _JSON.encode(turn)
    parts = (
        _JSON.encode({name: turn[name] for name in names[:place]})[1:-1],
        tokens[1:-1],
        _JSON.encode({name: turn[name] for name in names[behind:]})[1:-1],
    )
    return f"{{{','.join(filter(None, parts))}}}"


def _trace_of(record: Json) -> Json:
    turns = record["turns"]
    record["turns"] = None
    is_trained = record["rejected"] is None and not record["is_baseline"] and record["error"] is None
    common = {
        "group": f"{record['step']}/{record['group']}",
        "task_id": record["task"]["id"],
    }
    outcome = sum(record["outcome_rewards"].values())
    contexts: list[list[int]] = []
    written: list[Json] = []
    for number, turn in enumerate(turns):
        before = _before(contexts, number, turn)
        prompt_ids = before + turn["prompt_ids"]
        response_ids = turn["response_ids"]
        contexts.append(prompt_ids + response_ids)
        mask = int(is_trained and turn.get("is_trained", True))
        is_last = number == len(turns) - 1
        reward = turn["reward"] + outcome if is_last else turn["reward"]
        has_above_0 = max(turn["logprobs"], default=0.0) > 0
        logprobs = turn["logprobs"]
        if has_above_0:  # by rounding; the schema has none
            logprobs = [min(logprob, 0.0) for logprob in logprobs]
        request, response = _messages(turn)
        written.append(
            {
                "node_id": f"{common['task_id']}/{record['sibling']}/{number}",
                "prompt_token_ids": prompt_ids,
                "completion_token_ids": response_ids,
                "per_token_logps": logprobs,
                "loss_mask": [0] * len(prompt_ids) + [mask] * len(response_ids),
                "request": request,
                "response": response,
                "metadata": {**common, "reward": reward, "turnwise": {"turn": _ours(turn, has_above_0)}},
            }
        )
    written[0]["metadata"]["turnwise"]["record"] = record
    return {"schema_version": SCHEMA_VERSION, "turns": written}


def _before(contexts: Sequence[list[int]], number: int, turn: Mapping[str, Any]) -> list[int]:
    """The ids of the context that a turn continues; none if it starts one."""
    if number == 0 or turn["starts_context"]:
        return []
    parent = number - 1 if turn["parent"] is None else turn["parent"]
    return contexts[parent]


def _messages(turn: Mapping[str, Any]) -> tuple[Json, Json]:
    """What is new in a turn, as a request and its response in OpenAI's form."""
    messages = turn.get("messages") or [
        {"role": "user", "content": turn["observation"]},
        {"role": "assistant", "content": turn["text"]},
    ]
    choice = {"message": messages[-1], "finish_reason": turn["finish_reason"]}
    return {"messages": messages[:-1]}, {"choices": [choice]}


def _ours(turn: Json, keeps_logprobs: bool) -> Json:
    """The fields of a turn with null for those that TrainingTrace has."""
    ours = {name: None if name in _TOKENS else value for name, value in turn.items()}
    if keeps_logprobs:
        ours["logprobs"] = turn["logprobs"]
    return ours


def own_lines(trace: Mapping[str, Any], place: str) -> list[bytes] | None:
    """The lines of `rollouts.jsonl` that a trace of `written_traces` stands for; None if it is another
    program's. Raises DataError if tokens and our own fields contradict each other."""
    turns = [checked_turn(turn, f"{place}, turn {number}") for number, turn in enumerate(trace["turns"])]
    fields = [turn["metadata"].get("turnwise") for turn in turns]
    if not fields or not isinstance(fields[0], dict) or "record" not in fields[0]:
        return None
    contexts: list[list[int]] = []
    written: list[Json] = []
    has_checked_tokens = True
    for number, (turn, ours) in enumerate(zip(turns, fields, strict=True)):
        here = f"{place}, turn {number} ({turn['node_id']})"
        if not isinstance(ours, dict) or not isinstance(ours.get("turn"), dict):
            raise DataError(f"{here}: metadata.turnwise is missing, and the first turn has it")
        record = dict(ours["turn"])
        prompt_ids = turn["prompt_token_ids"]
        try:
            before = _before(contexts, number, record)
        except (KeyError, TypeError, IndexError) as fault:
            raise DataError(f"{here}: metadata.turnwise.turn is damaged ({fault})") from fault
        if prompt_ids[: len(before)] != before:
            raise DataError(
                f"{here}: its prompt doesn't begin with the turn that metadata.turnwise says it continues; "
                "remove metadata.turnwise to read the tokens as they are"
            )
        record["prompt_ids"] = prompt_ids[len(before) :]
        check_ids(record["prompt_ids"], "prompt_token_ids", here)
        record["response_ids"] = turn["completion_token_ids"]
        if record.get("logprobs") is None:
            record["logprobs"] = turn["per_token_logps"]
        else:
            has_checked_tokens = False
        contexts.append(prompt_ids + turn["completion_token_ids"])
        written.append(record)
    whole = {**fields[0]["record"], "turns": written}
    records = [*fields[0].get("before", ()), whole, *fields[0].get("after", ())]
    for record in records:
        try:
            check_record(record, has_checked_tokens and record is whole)
        except ValueError as fault:
            raise DataError(f"{place}: metadata.turnwise is damaged ({fault})") from fault
    return [_written_record(record) for record in records]
