"""The parity gate: do the servers sample from the distribution that is trained?

`docs/design/parity.md` says what is asked and when, and what a failure is tried for."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from turnwise.batching.samples import build_samples
from turnwise.chat.conversation import TokenConversation
from turnwise.chat.template import ChatTemplate
from turnwise.errors import ConfigError, DeadlineError, ParityError
from turnwise.pipelines.parity_diagnosis import Evidence, Suspects, diagnose, differences
from turnwise.protocols import AgentLoop, PolicyServer
from turnwise.types import (
    AS_OPENED,
    CallOptions,
    FloatArray,
    Message,
    Metric,
    Sample,
    SamplingParams,
    Task,
    Trajectory,
    Turn,
    derive_seed,
)

logger = logging.getLogger(__name__)

Prompt = list[Message]


class Probe:
    """A conversation that goes on under one request id as long as the run, and starts over where it is told to.

    It opens with `prompt` and then says the last message of it again. The same turn has the same seed every time."""

    def __init__(
        self,
        template: ChatTemplate,
        server: PolicyServer,
        request_id: str,
        prompt: Prompt,
        sampling: SamplingParams,
        max_length: int,
    ) -> None:
        self._context = (template, server, request_id, sampling, max_length)
        self._prompt = prompt
        self.start_over()

    def start_over(self) -> None:
        self._conversation = TokenConversation(*self._context)

    @property
    def num_turns(self) -> int:
        return len(self._conversation.turns)

    async def speak(self) -> bool:
        """Takes one more turn; False if the context has no room for it."""
        messages = self._prompt[-1:] if self.num_turns else self._prompt
        return await self._conversation.generate(messages) is not None

    def sample(self, num_scored: int) -> Sample:
        """The conversation so far, with the tokens of the last `num_scored` turns under its response mask."""
        sample = _sample(self._conversation.turns)
        sample.response_mask[: sample.turn_spans[-num_scored].start] = False
        return sample


class _Listener:
    """A conversation that hears what an agent says first, and has no room to answer."""

    def __init__(self, max_length: int) -> None:
        self.turns: list[Turn] = []
        self.heard: Prompt = []
        self._max_length = max_length

    async def generate(self, new_messages: Sequence[Message], options: CallOptions = AS_OPENED) -> None:
        self.heard = self.heard or list(new_messages)

    async def close(self) -> None:
        return None

    def remaining_tokens(self) -> int:
        return self._max_length


async def first_prompts(
    agents: Mapping[str, AgentLoop], seed: int, sampling: SamplingParams, max_length: int
) -> dict[str, Prompt]:
    """The first prompt of each tag's agent, in a task of the gate's own; none if agent or environment fail."""
    prompts = {}
    for tag, agent in agents.items():
        listener = _Listener(max_length)

        def open_conversation(*args: Any, listener: _Listener = listener, **kwargs: Any) -> _Listener:
            return listener

        try:
            await agent.run(_task(tag, derive_seed(seed, "parity", tag)), 0, open_conversation, sampling)
        except (ConfigError, DeadlineError):
            raise
        except Exception as error:  # boundary: agents and environments are foreign code; what is wrong with them, rollouts say
            logger.info("parity: %s gave no first prompt (%r); the parity check does without it", tag, error)
        if listener.heard:
            prompts[tag] = listener.heard
    return prompts


def _sample(turns: Sequence[Turn]) -> Sample:
    [sample] = build_samples(Trajectory(_task("", seed=0), sibling=0, turns=list(turns)))
    return sample


def _task(tag: str, seed: int) -> Task:
    return Task(id=f"parity/{tag}", tag=tag, split="train", seed=seed)


logger = logging.getLogger(__name__)

TOKENS_PER_TURN = 4
_MAX_TURNS = 4  # turns after which a conversation that outlives updates starts over


class ParityGate:
    """Has the servers of the rollouts sample a few tokens, and the trainer score them again.

    Asked are two turns of new conversations, the same at every check, so that what is logged follows from the weights alone;
    and one more turn of conversations that go on over updates, which a server that keeps old prefixes answers from old weights.
    All have request ids of their own that are never released, and if it `forgets` the servers drop what they have cached: what
    the gate leaves in a cache serves nobody else. That waits for requests in flight, so it is for runs that have none then.

    Each prompt opens one conversation of both kinds. It samples by `sampling`."""

    def __init__(
        self,
        *,
        run_async: Callable[..., Any],
        server: PolicyServer,
        template: ChatTemplate,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        max_length: int,
        max_diff: float,
        suspects: Suspects,
        forgets: bool = True,
    ) -> None:
        self._run_async = run_async
        self._forgets = forgets
        self._server = server
        self._sampling = sampling
        self._max_diff = max_diff
        self._suspects = suspects
        self._last: tuple[int, list[Sample]] | None = None  # the new conversations of the last check, and its version

        def probe(name: str, prompt: Prompt) -> Probe:
            own = replace(self._sampling, seed=derive_seed(sampling.seed, name))
            return Probe(template, server, name, prompt, own, max_length)

        self._new = [probe(f"parity/new/{index}", prompt) for index, prompt in enumerate(prompts)]
        self._kept = [probe(f"parity/kept/{index}", prompt) for index, prompt in enumerate(prompts)]

    def check(self, version: int) -> list[Metric]:
        """Measures new conversations, and holds kept ones to the same bound. The servers must have just got `version`."""
        started = time.perf_counter()
        new, kept = self._run_async(self._play(version))
        # One after the other: the last bits of a log-prob depend on what it is packed with.
        measured, held = self._differences(new), self._differences(kept)
        for played, found in ((new, measured), (kept, held)):
            # Negated, so that NaN fails.
            if not found.mean() <= self._max_diff:
                raise ParityError(diagnose(self._evidence(version, played, new), self._suspects))
        if self._last is None:
            logger.info("parity: sampler and trainer differ by %.2g nats a token", measured.mean())
        self._last = version, new
        return [
            Metric("parity/logprob_diff_mean", float(measured.mean()), weight=len(measured)),
            Metric("parity/logprob_diff_max", float(measured.max()), "max"),
            Metric("parity/num_tokens", float(len(measured)), "sum"),
            Metric("time/parity_s", time.perf_counter() - started, "sum"),
        ]

    async def _play(self, version: int) -> tuple[list[Sample], list[Sample]]:
        new = await asyncio.gather(*(_two_turns(probe) for probe in self._new))
        kept = await asyncio.gather(*(_next_turn(probe) for probe in self._kept))
        if self._forgets:
            # An episode that copied a prefix from here would differ in the last bits from one that computed it.
            await self._server.suspend()
            await self._server.resume(version)
        return new, kept

    def _differences(self, samples: Sequence[Sample]) -> FloatArray:
        return differences(samples, self._suspects.score(samples))

    def _evidence(self, version: int, played: Sequence[Sample], new: Sequence[Sample]) -> Evidence:
        # One replica alone may be at fault, so the conversations that agree are no evidence.
        failing = [sample for sample in played if not self._differences([sample]).mean() <= self._max_diff]
        ask_afresh = partial(self._ask_afresh, version, played)
        return Evidence(version, failing or played, self._max_diff, ask_afresh, self._change_since_last(new))

    def _change_since_last(self, new: Sequence[Sample]) -> tuple[int, float] | None:
        if self._last is None:
            return None
        version, before = self._last
        if not all(np.array_equal(a.token_ids, b.token_ids) for a, b in zip(before, new, strict=True)):
            return None
        return version, float(differences(new, [sample.rollout_logprobs for sample in before]).mean())

    def _ask_afresh(self, version: int, played: Sequence[Sample]) -> float:
        """The mean difference of the worst conversation where last turns are answered again by a server with nothing cached."""
        answered = self._run_async(self._answer_uncached(version, played))
        return max(float(self._differences([sample]).mean()) for sample in answered)

    async def _answer_uncached(self, version: int, samples: Sequence[Sample]) -> list[Sample]:
        await self._server.suspend()
        await self._server.sleep(["kv_cache"])
        await self._server.wake(["kv_cache"])
        await self._server.resume(version)
        return await asyncio.gather(*(self._answer(f"parity/afresh/{index}", sample) for index, sample in enumerate(samples)))

    async def _answer(self, request_id: str, sample: Sample) -> Sample:
        """The context of a sample up to its last turn, with another answer."""
        prompt_ids = sample.token_ids[: sample.turn_spans[-1].start]
        got = await self._server.generate(prompt_ids.tolist(), self._sampling, request_id)
        turn = Turn(prompt_ids, got.token_ids, got.logprobs, got.versions, starts_context=True)
        turn.kept_ids, turn.kept_offsets = got.kept_ids, got.kept_offsets
        return _sample([turn])


async def _two_turns(probe: Probe) -> Sample:
    probe.start_over()
    await probe.speak()
    await probe.speak()
    return probe.sample(num_scored=probe.num_turns)


async def _next_turn(probe: Probe) -> Sample:
    if probe.num_turns == _MAX_TURNS or not await probe.speak():
        probe.start_over()
        await probe.speak()
    return probe.sample(num_scored=1)
