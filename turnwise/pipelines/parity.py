"""The parity gate: checks that the servers sample from the policy that is trained. `docs/design/parity.md`
says what is compared and when, and how the cause of a failure is found."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from turnwise.batching.samples import build_samples
from turnwise.chat.conversation import TokenConversation
from turnwise.chat.template import ChatTemplate
from turnwise.errors import ConfigError, DeadlineError, ParityError
from turnwise.pipelines.parity_diagnosis import Evidence, Suspects, diagnose, logprob_differences
from turnwise.protocols import AgentLoop, PolicyServer
from turnwise.types import (
    AS_OPENED,
    CallOptions,
    FloatArray,
    IntArray,
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


@dataclass
class Probe:
    """A conversation that can start over, always under the same request id. Its first turn gets `prompt`;
    later turns get the last message of `prompt` again. Turn n always has the same seed."""

    template: ChatTemplate
    server: PolicyServer
    request_id: str
    prompt: Prompt
    sampling: SamplingParams
    max_length: int

    def __post_init__(self) -> None:
        self.start_over()

    def start_over(self) -> None:
        self._conversation = TokenConversation(
            self.template, self.server, self.request_id, self.sampling, self.max_length
        )

    @property
    def num_turns(self) -> int:
        return len(self._conversation.turns)

    async def speak(self) -> bool:
        """Samples one more turn. Returns False if the context has no room for it."""
        new_messages = self.prompt
        if self.num_turns:
            new_messages = self.prompt[-1:]
        return await self._conversation.generate(new_messages) is not None

    def sample(self, num_scored: int) -> Sample:
        """The conversation so far. Its response mask marks the sampled tokens of the last `num_scored`
        turns."""
        sample = _sample(self._conversation.turns)
        sample.response_mask[: sample.turn_spans[-num_scored].start] = False
        return sample


class _Listener:
    """A conversation that notes an agent's first messages and never answers, as if its context were full."""

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
    """The first prompt of each tag's agent, in a task made for the gate. A tag is left out if its agent gives
    no prompt."""
    prompts = {}
    for tag, agent in agents.items():
        listener = _Listener(max_length)

        def open_conversation(*args: Any, listener: _Listener = listener, **kwargs: Any) -> _Listener:
            return listener

        task = _task(tag, derive_seed(seed, "parity", tag))
        try:
            await agent.run(task, 0, open_conversation, sampling)
        except (ConfigError, DeadlineError):
            raise
        except (
            Exception
        ) as error:  # boundary: agents and environments are foreign code; rollouts report errors
            logger.info("parity: %s gave no first prompt (%r); the parity check does without it", tag, error)
        if listener.heard:
            prompts[tag] = listener.heard
    return prompts


def _sample(turns: Sequence[Turn]) -> Sample:
    trajectory = Trajectory(_task("", seed=0), sibling=0, turns=list(turns))
    [sample] = build_samples(trajectory)
    return sample


def _task(tag: str, seed: int) -> Task:
    return Task(
        id=f"parity/{tag}",
        tag=tag,
        split="train",
        seed=seed,
    )


TOKENS_PER_TURN = 4
_MAX_TURNS = 4  # turns after which a continued conversation starts over
_MORE_TOKENS = 64
"""Tokens by which each conversation goes on where chance may have made the first ones differ too much."""
_MAX_CHANCE = 3.0
"""By so many times the bound, the mean over a few tokens may exceed it by chance."""


@dataclass(kw_only=True)
class ParityGate:
    """Compares the log-probs of a few tokens that the servers sample with those that the trainer computes.

    Each prompt has two conversations. The new one has two turns and starts over at every check, so its
    metrics depend on the weights alone. The continued one gets a turn per check and starts over after
    `_MAX_TURNS`: a server that still cached its prefix from before the weight update would answer from old
    weights. Both are sampled with `sampling`.

    The gate's request ids are never released. With `forgets` the servers drop their caches after a check, so
    that no episode reuses what the gate cached. Dropping caches waits for running requests, so set `forgets`
    only if none run at a check."""

    run_async: Callable[..., Any]
    server: PolicyServer
    template: ChatTemplate
    prompts: Sequence[Prompt]
    sampling: SamplingParams
    max_length: int
    max_diff: float
    suspects: Suspects
    forgets: bool = True

    def __post_init__(self) -> None:
        self._last: tuple[int, list[Sample]] | None = None
        """The version of the last check, and its new conversations."""
        self._new = self._probes("parity/new")
        # The names say "kept", as in earlier revisions, since the seeds are derived from them.
        self._continued = self._probes("parity/kept")

    def _probes(self, name: str) -> list[Probe]:
        return [self._probe(f"{name}/{index}", prompt) for index, prompt in enumerate(self.prompts)]

    def _probe(self, name: str, prompt: Prompt) -> Probe:
        sampling = replace(self.sampling, seed=derive_seed(self.sampling.seed, name))
        return Probe(self.template, self.server, name, prompt, sampling, self.max_length)

    def check(self, version: int) -> list[Metric]:
        """Samples turns. Returns metrics of the new conversations. Raises ParityError if the mean difference
        of the new or the continued ones exceeds `max_diff` (nats per token) and isn't chance. Call it right
        after the servers have received policy `version`."""
        started = time.perf_counter()
        new, continued = self.run_async(self._play())
        # Scored separately: the last bits of a log-prob depend on the other tokens of its batch.
        measured = self._differences(new)
        of_continued = self._differences(continued)
        for probes, played, differences in (
            (self._new, new, measured),
            (self._continued, continued, of_continued),
        ):
            # Negated, so that NaN fails.
            if not differences.mean() <= self.max_diff:
                faulty = self._faulty_samples(probes, played)
                if faulty:
                    raise ParityError(diagnose(self._evidence(version, faulty, new), self.suspects))
        if self.forgets:
            self.run_async(self._forget(version))
        if self._last is None:
            logger.info("parity: sampler and trainer differ by %.2g nats per token", measured.mean())
        self._last = version, new
        return [
            Metric("parity/logprob_diff_mean", float(measured.mean()), weight=len(measured)),
            Metric("parity/logprob_diff_max", float(measured.max()), "max"),
            Metric("parity/num_tokens", float(len(measured)), "sum"),
            Metric("time/parity_s", time.perf_counter() - started, "sum"),
        ]

    async def _play(self) -> tuple[list[Sample], list[Sample]]:
        new = await asyncio.gather(*(_two_turns(probe) for probe in self._new))
        continued = await asyncio.gather(*(_next_turn(probe) for probe in self._continued))
        return new, continued

    async def _forget(self, version: int) -> None:
        """If an episode reused a prefix from here, the last bits of its log-probs would change."""
        await self.server.suspend()
        await self.server.resume(version)

    def _faulty_samples(self, probes: Sequence[Probe], played: Sequence[Sample]) -> list[Sample]:
        """The samples that show a fault, where those `played` exceed the bound; none if it was chance.

        Rounding in fp32 is a thousandth of the bound, so nothing is left to chance there. Rounding in 16 bits
        brings the mean of a few tokens over the bound at times, but not far over it."""
        if not self.suspects.may_round or self._is_far_over(played):
            return list(played)
        longer = self.run_async(self._go_on(probes, played))
        together = [*played, *longer]
        mean = float(self._differences(together).mean())
        logger.warning(
            "parity: sampler and trainer differed by %.2g nats per token over the first %d tokens, and by "
            "%.2g with %d more; parity_max_logprob_diff is %g",
            self._differences(played).mean(),
            _num_scored(played),
            mean,
            _num_scored(longer),
            self.max_diff,
        )
        return [] if mean <= self.max_diff else together

    def _is_far_over(self, played: Sequence[Sample]) -> bool:
        """Whether all conversations, or one of them, since one replica alone may be wrong, differ by more
        than chance makes."""
        groups = [played, *([sample] for sample in played)]
        limit = _MAX_CHANCE * self.max_diff
        return any(not self._differences(group).mean() <= limit for group in groups)

    async def _go_on(self, probes: Sequence[Probe], played: Sequence[Sample]) -> list[Sample]:
        """More tokens behind each conversation's last turn, under its request id, so that a prefix that the
        server still caches is used again. A conversation whose context is full has none. The next prompt of a
        continued conversation then no longer extends exactly what is cached."""

        async def go_on(probe: Probe, sample: Sample) -> Sample:
            room = self.max_length - len(sample.token_ids)
            sampling = replace(probe.sampling, max_new_tokens=min(_MORE_TOKENS, room))
            return await self._ask(probe.request_id, sample.token_ids, sampling)

        with_room = [
            (probe, sample)
            for probe, sample in zip(probes, played, strict=True)
            if len(sample.token_ids) < self.max_length
        ]
        return await asyncio.gather(*(go_on(probe, sample) for probe, sample in with_room))

    def _differences(self, samples: Sequence[Sample]) -> FloatArray:
        return logprob_differences(samples, self.suspects.score(samples))

    def _evidence(self, version: int, played: Sequence[Sample], new: Sequence[Sample]) -> Evidence:
        # Perhaps only one replica is wrong, so conversations that agree are left out.
        failing = [sample for sample in played if not self._differences([sample]).mean() <= self.max_diff]
        ask_afresh = partial(self._ask_afresh, version, played)
        return Evidence(
            version,
            failing or played,
            self.max_diff,
            ask_afresh,
            self._change_since_last(new),
        )

    def _change_since_last(self, new: Sequence[Sample]) -> tuple[int, float] | None:
        if self._last is None:
            return None
        version, previous = self._last
        for old_sample, new_sample in zip(previous, new, strict=True):
            if not np.array_equal(old_sample.token_ids, new_sample.token_ids):
                return None
        changes = logprob_differences(new, [sample.rollout_logprobs for sample in previous])
        return version, float(changes.mean())

    def _ask_afresh(self, version: int, played: Sequence[Sample]) -> float:
        """Lets servers with empty caches answer the last turns again; returns the mean difference of the
        worst conversation."""
        answered = self.run_async(self._answer_uncached(version, played))
        return max(float(self._differences([sample]).mean()) for sample in answered)

    async def _answer_uncached(self, version: int, samples: Sequence[Sample]) -> list[Sample]:
        await self.server.suspend()
        await self.server.sleep(["kv_cache"])
        await self.server.wake(["kv_cache"])
        await self.server.resume(version)
        return await asyncio.gather(
            *(
                self._ask(f"parity/afresh/{index}", _last_prompt(sample), self.sampling)
                for index, sample in enumerate(samples)
            )
        )

    async def _ask(self, request_id: str, prompt_ids: IntArray, sampling: SamplingParams) -> Sample:
        completion = await self.server.generate(prompt_ids.tolist(), sampling, request_id)
        turn = Turn(
            prompt_ids,
            completion.token_ids,
            completion.logprobs,
            completion.versions,
            starts_context=True,
        )
        turn.kept_ids = completion.kept_ids
        turn.kept_offsets = completion.kept_offsets
        return _sample([turn])


def _last_prompt(sample: Sample) -> IntArray:
    """What the server was asked in the last turn."""
    return sample.token_ids[: sample.turn_spans[-1].start]


def _num_scored(samples: Sequence[Sample]) -> int:
    return sum(int(sample.response_mask.sum()) for sample in samples)


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
