"""The parity gate's requests to the servers: first prompts of the run, in conversations that outlive weight updates."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from turnwise.batching.samples import build_samples
from turnwise.chat.conversation import TokenConversation
from turnwise.chat.template import ChatTemplate
from turnwise.errors import ConfigError, DeadlineError
from turnwise.protocols import AgentLoop, PolicyServer
from turnwise.types import FloatArray, Message, Sample, SamplingParams, Task, Trajectory, Turn, derive_seed

logger = logging.getLogger(__name__)

Prompt = list[Message]


def differences(samples: Sequence[Sample], logprobs: Sequence[FloatArray]) -> FloatArray:
    """Nats [R] between what was sampled and `logprobs`, arrays [N] a sample, at the R tokens under the response masks."""
    pairs = zip(samples, logprobs, strict=True)
    return np.concatenate([np.abs(s.rollout_logprobs - other)[s.response_mask] for s, other in pairs])


class Probe:
    """A conversation that goes on under one request id as long as the run, and starts over where it is told to.

    It opens with `prompt` and then says the last message of it again. The same turn has the same seed every time.
    """

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
        [sample] = build_samples(Trajectory(_task("", seed=0), sibling=0, turns=list(self._conversation.turns)))
        sample.response_mask[: sample.turn_spans[-num_scored].start] = False
        return sample


class _Listener:
    """A conversation that hears what an agent says first, and has no room to answer."""

    def __init__(self, max_length: int) -> None:
        self.turns: list[Turn] = []
        self.heard: Prompt = []
        self._max_length = max_length

    async def generate(self, new_messages: Sequence[Message], max_new_tokens: int | None = None) -> None:
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


def _task(tag: str, seed: int) -> Task:
    return Task(id=f"parity/{tag}", tag=tag, split="train", seed=seed)
