"""The records of one step as the pages read them: groups of siblings, the texts of their tokens, and a row
for each episode that the search goes through. docs/design/viewer.md walks one episode through."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, get_args

from turnwise.report.view.episode_spans import SpansOfStep, rows_of
from turnwise.report.view.token_texts import TokenTexts
from turnwise.spec import TokenValue

Json = dict[str, Any]

_OF_TASK = ("id", "tag", "split", "seed", "epoch", "payload", "agent", "row")
_OF_TRAJECTORY = (
    "sibling",
    "status",
    "limit",
    "score",
    "score_kl_penalty",
    "outcome_rewards",
    "metrics",
    "comments",
    "error",
    "role",
    "weight",
    "contexts_are",
    "answer_turn",
    "is_baseline",
)
_OF_TURN = (
    "response_ids",
    "versions",
    "finish_reason",
    "text",
    "observation",
    "action",
    "reward",
    "state_key",
    "metrics",
    "starts_context",
    "parent",
    "is_greedy",
    "generate_s",
    "step_s",
    "sampling",
    "tool_results",
    "messages",
)
_DIGITS = 4
_NUM_IDS = 2**31
_LARGEST = 2**53
"""Numbers in a browser are exact up to here."""
STATUS_LETTERS = {"finished": "f", "truncated": "t", "failed": "x"}
REJECTIONS = (None, "failed", "filtered", "stale")


@dataclass(slots=True)
class StepData:
    """One step for the pages."""

    data: Json
    """What the step's own file holds: `groups`, `texts` of tokens by id, `special` ids, `tools`."""
    summary: Json
    """What the index holds of it: columns over groups and over episodes, for lists and the search."""


@dataclass(slots=True)
class _Reading:
    """What the episodes of a step share."""

    texts: TokenTexts | None
    spans: SpansOfStep
    ids: set[int] = field(default_factory=set)
    tools: list[Any] = field(default_factory=list)

    def tools_index(self, tools: Any) -> int:
        """The place of these schemas among the step's, which are few."""
        if tools not in self.tools:
            self.tools.append(tools)
        return self.tools.index(tools)


def step_data(
    step: int,
    records: Sequence[Json],
    texts: TokenTexts | None,
    num_damaged: int = 0,
    spans: SpansOfStep = MappingProxyType({}),
) -> StepData:
    """The step of these records. Without `texts`, tokens have no text, and only their ids are shown. `spans`
    are those of the step's traces."""
    reading = _Reading(texts, spans)
    groups: dict[tuple[int, str], Json] = {}
    for record in records:
        try:
            trajectory = _trajectory(record, reading)
            key = (int(record.get("group", 0)), str(record["task"].get("id")))
        except (TypeError, ValueError, AttributeError, LookupError, OverflowError):
            # An object of another program, or of a version whose fields differ.
            num_damaged += 1
            continue
        group = groups.get(key)
        if group is None:
            group = {
                "index": key[0],
                "rejected": record.get("rejected"),
                "task": exact(_chosen(record["task"], _OF_TASK)),
                "length": record.get("group_length"),
                "members": [],
            }
            groups[key] = group
        group["members"].append(trajectory)
    data: Json = {"step": step, "groups": list(groups.values()), "tools": reading.tools}
    if num_damaged:
        data["damaged"] = num_damaged
    if texts is not None:
        ids = {token_id for token_id in reading.ids if type(token_id) is int and 0 <= token_id < _NUM_IDS}
        data["texts"] = texts.table(ids)
        data["special"] = sorted(ids.intersection(texts.decoder.special_ids))
    return StepData(data, _summary(step, data["groups"], num_damaged))


def _chosen(values: Mapping[str, Any], names: Iterable[str]) -> Json:
    """The values under these names, without those that the pages assume where a field is missing."""
    return {name: values[name] for name in names if name in values and not _is_assumed(values[name])}


def _is_assumed(value: Any) -> bool:
    is_empty = isinstance(value, str | list | dict) and not value
    return value is None or value is False or is_empty


def _trajectory(record: Json, reading: _Reading) -> Json:
    trajectory = _chosen(record, _OF_TRAJECTORY)
    trajectory["score"] = float(record.get("score", 0.0))
    trajectory["turns"] = [_turn(turn, reading) for turn in record["turns"]]
    attempts = reading.spans.get((str(record["task"].get("id")), int(record.get("sibling", 0))), ())
    spans = rows_of(attempts, trajectory["turns"])
    if spans:
        trajectory["spans"] = spans
    return trajectory


def _turn(record: Json, reading: _Reading) -> Json:
    turn = _chosen(record, _OF_TURN)
    response_ids = record.get("response_ids", [])
    prompt_ids = record.get("prompt_ids", [])
    reading.ids.update(response_ids)
    reading.ids.update(prompt_ids)
    if "state_key" in turn:
        turn["state_key"] = exact(turn["state_key"])
    turn["prompt_ids"] = prompt_ids
    turn["response_ids"] = response_ids
    turn["logprobs"] = _short(record.get("logprobs", []))
    if record.get("is_trained") is False:
        turn["is_untrained"] = True
    values = record.get("token_values", {})
    turn |= {name: values[name] for name in get_args(TokenValue) if name in values}
    if "kept_ids" in record:
        turn["kept"] = [len(ids) for ids in record["kept_ids"]]
    if "tools" in record:
        turn["tools"] = reading.tools_index(record["tools"])
    if "advantage" in record:
        advantage = record["advantage"]
        turn["advantage"] = _short(advantage) if isinstance(advantage, list) else _rounded(advantage)
    if "messages" not in record and reading.texts is not None:
        # An older file: the prompt's ids are all that is known of what the model saw.
        turn["prompt_text"] = reading.texts.decoder.decode(prompt_ids)
    return turn


def _short(values: Sequence[float]) -> list[float]:
    return [round(value, _DIGITS) for value in values]


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _summary(step: int, groups: Sequence[Json], num_damaged: int) -> Json:
    """Columns over the groups, and over their episodes in the same order."""
    members = [member for group in groups for member in group["members"]]
    summary: Json = {
        "step": step,
        "index": [group["index"] for group in groups],
        "task": [str(group["task"].get("id", "")) for group in groups],
        "tag": [str(group["task"].get("tag", "")) for group in groups],
        "rejected": "".join(str(_rejection(group["rejected"])) for group in groups),
        "size": [len(group["members"]) for group in groups],
        "score": [_rounded(member["score"]) for member in members],
        "tokens": [sum(len(turn["response_ids"]) for turn in member["turns"]) for member in members],
        "turns": [len(member["turns"]) for member in members],
        "status": "".join(STATUS_LETTERS.get(str(member.get("status")), "?") for member in members),
    }
    if any(member.get("is_baseline") for member in members):
        summary["baseline"] = "".join("1" if member.get("is_baseline") else "0" for member in members)
    numbers = [member.get("sibling", 0) for member in members]
    if numbers != [place for group in groups for place in range(len(group["members"]))]:
        summary["sibling"] = numbers
    if len(set(summary["tag"])) == 1:
        summary["tag"] = summary["tag"][:1]
    if num_damaged:
        summary["damaged"] = num_damaged
    return summary


def _rejection(rejected: str | None) -> int:
    return REJECTIONS.index(rejected) if rejected in REJECTIONS else 0


def exact(value: Any) -> Any:
    """The value with whole numbers as text that a browser would round, such as seeds.

    >>> exact({"seed": 2**62, "row": 3})
    {'seed': '4611686018427387904', 'row': 3}
    """
    if isinstance(value, int) and abs(value) > _LARGEST:
        return str(value)
    if isinstance(value, dict):
        return {name: exact(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [exact(inner) for inner in value]
    return value


def finite(value: Any) -> Any:
    """The value with None for numbers that JSON hasn't, such as infinity.

    >>> finite({"score": [1.0, float("inf")]})
    {'score': [1.0, None]}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return value
