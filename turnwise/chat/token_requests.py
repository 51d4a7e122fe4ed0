"""Requests of token ids, for agents that make their prompts themselves, and the turns that these become."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from turnwise.chat.sampler import check_completion, sampling_of_call
from turnwise.chat.template import ChatTemplate
from turnwise.errors import EnvironmentFault, RequestError, ServerError
from turnwise.protocols import PolicyServer
from turnwise.types import CallOptions, Completion, Limit, SamplingParams, Turn, VersionRun, derive_seed


class Sampled(NamedTuple):
    """One request and its answer."""

    prompt_ids: array[int]
    completion: Completion
    sampling: SamplingParams
    budget: int
    """Maximum new tokens that were asked for; the context may have had room for fewer."""


class MaskedIds(NamedTuple):
    """A context as an agent has written it down: ids, which of them were sampled, and, if it knows them,
    their log-probs (0 where nothing was sampled)."""

    ids: Sequence[int]
    mask: Sequence[int]
    logprobs: Sequence[float] | None = None


class FoundTurns(NamedTuple):
    """The turns of an episode's contexts."""

    turns: list[Turn]
    num_unsampled: int
    """Ids of which the agent says that they were sampled, although no server has sampled them and there are
    no log-probs: these are context."""
    cut_by: Limit | None
    """The limit that cut the response of the last turn."""


@dataclass
class TokenRequests:
    """Samples after prompts of token ids, and keeps what was sampled. `turns_of` finds it again in contexts
    that the agent writes down, so that log-probs and policy versions are the server's."""

    template: ChatTemplate
    server: PolicyServer
    max_length: int
    name: str
    sampling: SamplingParams
    _sampled: dict[bytes, list[Sampled]] = field(init=False, default_factory=dict)
    _num_requests: Counter[bytes] = field(init=False, default_factory=Counter)
    _request_ids: dict[str, str] = field(init=False, default_factory=dict)

    async def generate(self, prompt_ids: Sequence[int], options: CallOptions, request_id: str) -> Completion:
        """Samples the response to a prompt. The server keeps the context under `request_id`, which the agent
        chooses. Raises RequestError if the context has no room; ServerError if the server can't serve it."""
        ids = array("q", map(int, prompt_ids))
        room = self.max_length - len(ids)
        if room < 1:
            raise RequestError(
                f"the prompt of this request has {len(ids)} tokens and leaves no room for a response in "
                f"sequence_length {self.max_length}: send less, or raise sequence_length",
                "context_length_exceeded",
            )
        key = _digest(ids)
        seed = derive_seed(self.sampling.seed, key.hex(), self._num_requests[key])
        self._num_requests[key] += 1
        sampling = sampling_of_call(self.sampling, options, seed, room)
        budget = options.max_new_tokens or self.sampling.max_new_tokens
        server_id = self._request_ids.setdefault(request_id, f"{self.name}/{len(self._request_ids)}")
        completion = await self.server.generate(ids, sampling, server_id)
        check_completion(completion, sampling, server_id)
        if completion.finish_reason == "aborted":
            raise ServerError(f"the server aborted a request of {self.name!r}")
        self._sampled.setdefault(key, []).append(Sampled(ids, completion, sampling, budget))
        return completion

    def turns_of(self, contexts: Sequence[MaskedIds]) -> FoundTurns:
        """The turns of an episode's contexts. A response that several contexts share is one turn."""
        reader = _Reader(self.template, self._sampled)
        for context in contexts:
            reader.read(context)
        return FoundTurns(reader.turns, reader.num_unsampled, reader.cut_by)

    def verify(self) -> None:
        """Does nothing: turns are made of what the server has answered."""

    async def close(self) -> None:
        """Lets the server forget all contexts."""
        for server_id in self._request_ids.values():
            await self.server.release(server_id)
        self._request_ids.clear()


class _Reader:
    """Finds responses in contexts."""

    def __init__(self, template: ChatTemplate, sampled: dict[bytes, list[Sampled]]) -> None:
        self.turns: list[Turn] = []
        self.num_unsampled = 0
        self.cut_by: Limit | None = None
        """The limit that cut the response that was added last."""
        self._template = template
        self._sampled = sampled
        self._turn_at: dict[bytes, int] = {}
        """The turn whose response ends a context of these ids."""

    def read(self, context: MaskedIds) -> None:
        ids = array("q", map(int, context.ids))
        mask = [bool(bit) for bit in context.mask]
        if len(mask) != len(ids) or (context.logprobs is not None and len(context.logprobs) != len(ids)):
            raise EnvironmentFault(
                f"a context has {len(ids)} ids and {len(mask)} bits that say what was sampled"
            )
        parent: int | None = None
        start = 0  # of what was added since the last response
        position = mask.index(True) if True in mask else len(ids)
        while position < len(ids):
            run = _length_of_run(mask, position)
            turn, length = self._response(context, ids, position, run)
            if turn is not None:
                parent = self._add(turn, ids, start, position + length, parent)
                start = position + length
            position += length
            while position < len(ids) and not mask[position]:
                position += 1

    def _response(
        self, context: MaskedIds, ids: array[int], position: int, run: int
    ) -> tuple[Turn | None, int]:
        """The response at a position, and its length; None for ids that nobody sampled."""
        best: Sampled | None = None
        best_length = 0
        for sampled in self._sampled.get(_digest(ids[:position]), ()):
            answer = sampled.completion.token_ids.tolist()
            length = min(len(answer), run)
            if length > best_length and ids[position : position + length].tolist() == answer[:length]:
                best = sampled
                best_length = length
        if best is not None:
            return self._sampled_turn(best, best_length), best_length
        self.cut_by = None
        known = context.logprobs[position : position + run] if context.logprobs is not None else ()
        if not any(known):
            self.num_unsampled += run
            return None, run
        turn = self._turn(ids[position : position + run], np.array(known, np.float32))
        return turn, run

    def _sampled_turn(self, sampled: Sampled, length: int) -> Turn:
        completion = sampled.completion
        turn = self._turn(
            array("q", completion.token_ids[:length].tolist()),
            np.array(completion.logprobs[:length], np.float32),
        )
        turn.versions = _first_runs(completion.versions, length)
        turn.finish_reason = completion.finish_reason
        if length < len(completion.token_ids):
            turn.finish_reason = "length"
        self.cut_by = _cut_by(sampled, length)
        turn.sampling = sampled.sampling
        turn.is_greedy = sampled.sampling.is_greedy
        turn.generate_s = completion.generate_s
        if completion.kept_offsets is not None and completion.kept_ids is not None:
            turn.kept_offsets = completion.kept_offsets[: length + 1]
            turn.kept_ids = completion.kept_ids[: turn.kept_offsets[-1]]
        return turn

    def _turn(self, response_ids: array[int], logprobs: np.ndarray) -> Turn:
        ids = response_ids.tolist()
        return Turn(
            prompt_ids=np.zeros(0, np.int64),
            response_ids=np.array(ids, np.int64),
            logprobs=logprobs,
            text=self._template.decode(ids),
        )

    def _add(self, turn: Turn, ids: array[int], start: int, end: int, parent: int | None) -> int:
        """Adds the turn, unless an earlier context has it already. Returns its index."""
        key = _digest(ids[:end])
        if key in self._turn_at:
            return self._turn_at[key]
        added = ids[start : end - len(turn.response_ids)].tolist()
        turn.prompt_ids = np.array(added, np.int64)
        turn.observation = self._template.decode(added)
        turn.starts_context = parent is None
        turn.parent = parent
        self._turn_at[key] = len(self.turns)
        self.turns.append(turn)
        return len(self.turns) - 1


def _cut_by(sampled: Sampled, length: int) -> Limit | None:
    """The limit that cut a response of which an agent kept `length` tokens: its own is a budget too."""
    if length < len(sampled.completion.token_ids):
        return "max_new_tokens"
    if sampled.completion.finish_reason != "length":
        return None
    return "sequence_length" if sampled.sampling.max_new_tokens < sampled.budget else "max_new_tokens"


def _length_of_run(mask: Sequence[bool], position: int) -> int:
    end = position
    while end < len(mask) and mask[end]:
        end += 1
    return end - position


def _first_runs(versions: Sequence[VersionRun], length: int) -> tuple[VersionRun, ...]:
    """The policy versions of the first `length` tokens.

    >>> _first_runs((VersionRun(3, 2), VersionRun(4, 5)), 4)
    (VersionRun(version=3, num_tokens=2), VersionRun(version=4, num_tokens=2))
    """
    runs = []
    for run in versions:
        num_tokens = min(run.num_tokens, length)
        if num_tokens:
            runs.append(VersionRun(run.version, num_tokens))
        length -= num_tokens
    return tuple(runs)


def _digest(ids: array[int]) -> bytes:
    return hashlib.blake2b(ids.tobytes(), digest_size=16).digest()
