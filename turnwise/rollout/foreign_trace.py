"""Reads `TrainingTrace`s of other programs as trajectories: checks the schema, and finds contexts by their
tokens, groups and rewards."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json

from turnwise.errors import DataError, counted
from turnwise.rollout.record_check import are_finite, are_ids, check_record

Json = dict[str, Any]

_TURN_KEYS = {
    "node_id": str,
    "prompt_token_ids": list,
    "completion_token_ids": list,
    "per_token_logps": list,
    "loss_mask": list,
    "request": dict,
    "response": dict,
    "metadata": dict,
}
_OPTIONAL = ("request", "response", "metadata")
_FINISH_REASONS = {"stop": "stop", "length": "length", "tool_calls": "stop", None: "stop"}


def checked_trace(line: bytes, place: str) -> Json:
    """The trace of a line. Raises DataError unless it is one of schema version 1."""
    try:
        trace = from_json(line)
    except ValueError as fault:
        raise DataError(f"{place} isn't JSON ({fault}); was the file cut in the middle?") from fault
    if not isinstance(trace, dict) or not isinstance(trace.get("turns"), list):
        raise DataError(f"{place} is no TrainingTrace: it has no list `turns`")
    version = trace.get("schema_version", 1)
    if version != 1:
        raise DataError(f"{place} has schema_version {version!r}; this version reads TrainingTrace 1")
    names = [turn.get("node_id") for turn in trace["turns"] if isinstance(turn, dict)]
    for number, name in enumerate(names):
        if name in names[:number]:
            first = names.index(name)
            raise DataError(f"{place}, turn {number}: node_id {name!r} is that of turn {first} too")
    return trace


def checked_turn(turn: Any, place: str) -> Json:
    """A turn whose fields have the types and lengths of the schema, but for the ids of its prompt, which
    `check_ids` looks at. Raises DataError otherwise."""
    if not isinstance(turn, dict):
        raise DataError(f"{place} is no JSON object")
    turn = {**{key: {} for key in _OPTIONAL}, **turn}
    for key, kind in _TURN_KEYS.items():
        if not isinstance(turn.get(key), kind):
            raise DataError(f"{place}: {key} is {turn.get(key)!r:.40}; it must be a {kind.__name__}")
    here = f"{place} ({turn['node_id']})"
    num_prompt = len(turn["prompt_token_ids"])
    num_sampled = len(turn["completion_token_ids"])
    logprobs = turn["per_token_logps"]
    mask = turn["loss_mask"]
    check_ids(turn["completion_token_ids"], "completion_token_ids", here)
    if len(logprobs) != num_sampled:
        raise DataError(
            f"{here} has {num_sampled} sampled tokens and {len(logprobs)} log-probs; training needs the "
            "log-prob of each"
        )
    if not are_finite(logprobs):
        raise DataError(f"{here}: per_token_logps holds something other than finite numbers")
    num_trained = mask.count(1)
    has_others = mask.count(0) + num_trained != len(mask)
    if has_others or len(mask) != num_prompt + num_sampled:
        raise DataError(f"{here}: loss_mask must be 0 or 1 for each of {num_prompt} + {num_sampled} tokens")
    if num_trained and mask.index(1) < num_prompt:
        raise DataError(f"{here}: loss_mask is 1 in the prompt, which wasn't sampled")
    return turn


def check_ids(values: Sequence[Any], key: str, place: str) -> None:
    """Raises DataError unless these are ids of tokens."""
    if not are_ids(values):
        raise DataError(f"{place}: {key} holds something other than token ids")


@dataclass(slots=True)
class ForeignTraces:
    """Collects the traces of other programs, and groups them.

    Args:
        group_size: consecutive lines make a group, where `metadata` names none; None = such lines are
            refused.
        rewards: the reward of each line, in place of `metadata.reward`.
    """

    group_size: int | None = None
    rewards: Sequence[float] | None = None
    _groups: dict[str, list[Json]] = field(default_factory=dict)
    _num_lines: int = 0

    def add(self, trace: Mapping[str, Any], place: str) -> None:
        """Reads one trace as a trajectory."""
        turns: list[Json] = []
        for number, unchecked in enumerate(trace["turns"]):
            here = f"{place}, turn {number}"
            turn = checked_turn(unchecked, here)
            check_ids(turn["prompt_token_ids"], "prompt_token_ids", f"{here} ({turn['node_id']})")
            turns.append(turn)
        if not turns:
            raise DataError(f"{place} has no turns, so there is nothing to train on")
        group = self._group_of(turns[0]["metadata"], place)
        members = self._groups.setdefault(group, [])
        rewards, outcome = self._rewards_of(turns, place)
        members.append(_record(group, len(members), turns, rewards, outcome, place))
        self._num_lines += 1

    def _group_of(self, metadata: Mapping[str, Any], place: str) -> str:
        for key in ("group", "task_id"):
            if metadata.get(key) is not None:
                return str(metadata[key])
        if self.group_size is None:
            raise DataError(
                f"{place}: nothing says which group it is of; give each first turn metadata.group or "
                "metadata.task_id, or say --group-size N if N consecutive lines are a group"
            )
        return f"group {self._num_lines // self.group_size}"

    def _rewards_of(self, turns: Sequence[Json], place: str) -> tuple[list[float], dict[str, float]]:
        """The rewards of the turns, and those of the episode."""
        if self.rewards is not None:
            if self._num_lines >= len(self.rewards):
                raise DataError(f"{place}: --rewards has {counted(len(self.rewards), 'reward')}, one a line")
            return [0.0] * len(turns), {"reward": self.rewards[self._num_lines]}
        rewards = [turn["metadata"].get("reward") for turn in turns]
        if all(reward is None for reward in rewards):
            raise DataError(f"{place}: no turn has metadata.reward; write it there, or name --rewards FILE")
        for number, reward in enumerate(rewards):
            is_number = type(reward) in (int, float) and math.isfinite(reward)
            if reward is not None and not is_number:
                raise DataError(
                    f"{place}, turn {number}: metadata.reward is {reward!r:.40}, no finite number"
                )
        return [float(reward or 0.0) for reward in rewards], {}

    def lines(self) -> Iterator[bytes]:
        """The lines of `rollouts.jsonl`, group by group. Raises DataError if rewards are left over."""
        if self.rewards is not None and self._num_lines < len(self.rewards):
            raise DataError(
                f"--rewards has {counted(len(self.rewards), 'reward')} for {counted(self._num_lines, 'line')}"
            )
        for number, members in enumerate(self._groups.values()):
            for record in members:
                record |= {"group": number, "group_length": len(members)}
                try:
                    check_record(record)
                except ValueError as fault:
                    raise DataError(f"{record['task']['id']}: {fault}") from fault
                yield json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode()


def _record(
    group: str,
    sibling: int,
    turns: Sequence[Json],
    rewards: Sequence[float],
    outcome: Mapping[str, float],
    place: str,
) -> Json:
    """A line of `rollouts.jsonl` as an object, with `group` and `group_length` still open."""
    task = {
        "id": group,
        "tag": "training_trace",
        "split": "train",
        "seed": 0,
        "epoch": 0,
        "payload": {},
        "agent": "",
        "row": None,
    }
    return {
        "step": 0,
        "group": 0,
        "group_length": 0,
        "rejected": None,
        "is_baseline": False,
        "task": task,
        "sibling": sibling,
        "status": "finished",
        "limit": None,
        "score": sum(rewards) + sum(outcome.values()),
        "score_kl_penalty": 0.0,
        "outcome_rewards": dict(outcome),
        "metrics": {},
        "error": None,
        "role": "agent",
        "weight": 1.0,
        "contexts_are": "parts",
        "answer_turn": None,
        "turns": list(_turns(turns, rewards, place)),
    }


def _turns(turns: Sequence[Json], rewards: Sequence[float], place: str) -> Iterator[Json]:
    """The turns as records: each continues the turn whose ids are the longest prefix of its prompt, or starts
    a context."""
    contexts: list[list[int]] = []
    for number, (turn, reward) in enumerate(zip(turns, rewards, strict=True)):
        prompt_ids = turn["prompt_token_ids"]
        sampled = turn["completion_token_ids"]
        mask = turn["loss_mask"][len(prompt_ids) :]
        if len(set(mask)) > 1:
            raise DataError(
                f"{place}, turn {number} ({turn['node_id']}): loss_mask trains {sum(mask)} of {len(mask)} "
                "sampled tokens; a response is trained as a whole or not at all"
            )
        parent = _longest_prefix(contexts, prompt_ids)
        num_before = 0 if parent is None else len(contexts[parent])
        contexts.append(prompt_ids + sampled)
        yield {
            "observation": _last_text(turn["request"].get("messages")),
            "text": _last_text([_choice(turn["response"]).get("message")]),
            "action": None,
            "reward": reward,
            "finish_reason": _FINISH_REASONS.get(_choice(turn["response"]).get("finish_reason"), "stop"),
            "metrics": {},
            "starts_context": parent is None,
            "parent": None if parent == number - 1 else parent,
            "is_greedy": False,
            "is_trained": 0 not in mask,
            "prompt_ids": prompt_ids[num_before:],
            "response_ids": sampled,
            "logprobs": turn["per_token_logps"],
            "versions": [[0, len(sampled)]] if sampled else [],
            "state_key": None,
            "generate_s": 0.0,
            "step_s": 0.0,
        }


def _longest_prefix(contexts: Sequence[list[int]], prompt_ids: list[int]) -> int | None:
    """The index of the longest context that the prompt begins with."""
    longest: int | None = None
    for index, context in enumerate(contexts):
        is_longer = longest is None or len(context) > len(contexts[longest])
        if is_longer and prompt_ids[: len(context)] == context:
            longest = index
    return longest


def _choice(response: Mapping[str, Any]) -> Mapping[str, Any]:
    choices = response.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], dict):
        return choices[0]
    return {}


def _last_text(messages: Any) -> str:
    """The text of the last message; empty if there is none."""
    if not isinstance(messages, list) or not messages or not isinstance(messages[-1], dict):
        return ""
    content = messages[-1].get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))
