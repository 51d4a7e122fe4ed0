"""Conversations: `TokenConversation` is one path through a ledger of token ids, and `TextConversation` talks
to a text-in, text-out model."""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from turnwise.chat.ledger import EMPTY, Ledger
from turnwise.chat.message_content import Messages, num_characters_of
from turnwise.chat.rendering import Tools
from turnwise.chat.replies import in_openai_form
from turnwise.chat.sampler import (
    NO_LIMIT,
    NoRoom,
    OnPrompt,
    ResponseRequest,
    SamplingOf,
    TokenSampler,
    sampling_of_call,
)
from turnwise.chat.template import ChatTemplate
from turnwise.errors import RolloutError
from turnwise.protocols import PolicyServer
from turnwise.protocols.tools import ToolCall, ToolCallParser
from turnwise.types import AS_OPENED, CallOptions, FinishReason, Message, SamplingParams, Turn, derive_seed

logger = logging.getLogger(__name__)


class TokenConversation:
    """A Conversation over a PolicyServer. Ids are only appended. Each response adds a Turn. `generate` calls
    mustn't overlap.

    `max_length` is the size of the context in tokens (`sequence_length`). Turn k samples with a seed derived
    from `sampling.seed` and k, so no response depends on what else the server is doing. If an agent rewrote
    history, `parent` is the index of the turn at which this context branches off; the first Turn records it.
    `opens_episode` marks the episode's first context: there a first prompt that is too long raises
    RolloutError, while in a later context `generate` returns None. `tools` are the schemas that the first
    prompt shows; the `parser` reads tool calls from the responses. `on_prompt` is called with each prompt
    before the server is asked.

    >>> import asyncio
    >>> from turnwise.testing.fakes import ScriptedServer, byte_tokenizer
    >>> template = ChatTemplate(byte_tokenizer())
    >>> server = ScriptedServer([template.respond("Right")])
    >>> sampling = SamplingParams(max_new_tokens=16)
    >>> conversation = TokenConversation(template, server, "episode-0", sampling, max_length=256)
    >>> asyncio.run(conversation.generate([{"role": "user", "content": "Where to?"}]))
    {'role': 'assistant', 'content': 'Right'}
    >>> conversation.turns[0].finish_reason
    'stop'
    """

    def __init__(
        self,
        template: ChatTemplate,
        server: PolicyServer,
        request_id: str,
        sampling: SamplingParams,
        max_length: int,
        *,
        parent: int | None = None,
        tools: Tools = (),
        parser: ToolCallParser | None = None,
        opens_episode: bool = True,
        on_prompt: OnPrompt | None = None,
    ) -> None:
        stop_token_ids = dict.fromkeys([*sampling.stop_token_ids, *template.stop_token_ids])
        self.request_id = request_id
        self._sampler = TokenSampler(template, server, max_length, parser, on_prompt)
        self._ledger = Ledger(request_id)
        self.turns = self._ledger.turns
        self._prefix = EMPTY
        self._sampling = replace(sampling, stop_token_ids=tuple(stop_token_ids))
        self._parent = parent
        self._tools = tools
        self._opens_episode = opens_episode
        self._is_closed = False

    async def generate(self, new_messages: Messages, options: CallOptions = AS_OPENED) -> Message | None:
        """Adds the messages, samples a response and returns it as an assistant message. With tools and a
        parser, this message has `tool_calls`, in OpenAI's form, and `call_errors`, a sentence for each call
        that can't be read. Its `content` is the text around the calls, its `reasoning_content` the thinking;
        `Turn.text` has all that was sampled. If `options` names other tools than before, a new context
        starts, whose prompt is the whole conversation.

        If the last message is an assistant's, the response continues it. The recorded message then has all
        its words, the returned one only those that were sampled.

        Returns None if the context has no room for the messages and one sampled token; then nothing is added
        or sampled. Nothing is added either if the server refuses the request. Raises ChatTemplateError if the
        template refuses the messages; RolloutError if the episode's first prompt leaves no room in its
        context, or the conversation is closed; ServerError if the server can't serve the request, or its
        answer breaks the contract."""
        if self._is_closed:
            raise RolloutError(f"{self.request_id!r} is closed: open another context to say more")
        request = self._request(new_messages, options)
        prefix = self._prefix if request.earlier is None else EMPTY
        sampled = await self._sampler.sample_after(prefix, request)
        if isinstance(sampled, NoRoom):
            self._refuse(sampled)
            return None
        # Only the first turn of a context branches off.
        parent = None if self.turns else self._parent
        self._ledger.commit(sampled.turn, sampled.prefix, parent, sampled.messages)
        self._prefix = sampled.prefix
        self._tools = request.tools
        return sampled.reply

    def remaining_tokens(self) -> int:
        """Tokens that the context still has room for."""
        return self._sampler.max_length - self._prefix.num_tokens

    async def close(self) -> None:
        """Lets the server forget the context; the turns stay."""
        if not self._is_closed:
            await self._sampler.server.release(self.request_id)
            self._is_closed = True

    def verify(self) -> None:
        """Raises RolloutError if the ids of a turn were changed, or a turn was lost or moved."""
        self._ledger.verify()

    def _request(self, new_messages: Messages, options: CallOptions) -> ResponseRequest:
        """The request for the next response. With other tools than before, it repeats what was said in
        earlier contexts."""
        tools = self._tools if options.tools is None else options.tools
        starts_anew = bool(self.turns) and list(tools) != list(self._tools)
        return ResponseRequest(
            request_id=self.request_id,
            messages=new_messages,
            tools=tools,
            sampling_of=self._sampling_of(options),
            number=len(self.turns) + 1,
            earlier=self._ledger.messages() if starts_anew else None,
        )

    def _sampling_of(self, options: CallOptions) -> SamplingOf:
        seed = derive_seed(self._sampling.seed, len(self.turns))
        return lambda prompt_ids, room: sampling_of_call(self._sampling, options, seed, room)

    def _refuse(self, no_room: NoRoom) -> None:
        """Raises RolloutError for the episode's first prompt. Warns of messages that no context has room
        for."""
        max_length = self._sampler.max_length
        num_tokens = no_room.num_tokens
        if self._opens_episode and not self.turns:
            size = f"{num_tokens} tokens"
            if num_tokens is None:
                size = f"{no_room.num_characters} characters"
            raise RolloutError(
                f"the first prompt of {self.request_id!r} has {size} and leaves no room for a response in "
                f"sequence_length {max_length}: raise sequence_length or shorten the prompt's templates"
            )
        if num_tokens is None or num_tokens >= max_length:
            logger.warning(
                "%s: an observation of %d characters ends its context and fits into no other one: shorten "
                "it in the environment, or raise sequence_length (%d)",
                self.request_id,
                no_room.num_characters,
                max_length,
            )


class TextAnswer(NamedTuple):
    """The answer of a text-in, text-out model."""

    text: str
    finish_reason: FinishReason
    generate_s: float = 0.0
    tool_calls: tuple[ToolCall, ...] = ()


Complete = Callable[[Messages, SamplingParams, Tools], Awaitable[TextAnswer | None]]
"""Called with all messages so far, the sampling parameters and the tools' schemas. Returns None if no answer
is left."""


class TextConversation:
    """A Conversation with a model that reads and writes text. Its turns have no tokens, and its context
    length is unknown.

    >>> import asyncio
    >>> async def echo(messages, sampling, tools):
    ...     return TextAnswer(messages[-1]["content"], "stop")
    >>> conversation = TextConversation(echo, SamplingParams(max_new_tokens=8))
    >>> asyncio.run(conversation.generate([{"role": "user", "content": "Hi"}]))
    {'role': 'assistant', 'content': 'Hi'}
    """

    def __init__(self, complete: Complete, sampling: SamplingParams, tools: Tools = ()) -> None:
        self.turns: list[Turn] = []
        self.messages: list[Message] = []
        self._complete = complete
        self._sampling = sampling
        self._tools = tools

    async def generate(self, new_messages: Messages, options: CallOptions = AS_OPENED) -> Message | None:
        num_characters_of(new_messages)  # raises ChatTemplateError if these are no messages
        seed = derive_seed(self._sampling.seed, len(self.turns))
        sampling = sampling_of_call(self._sampling, options, seed)
        tools = self._tools if options.tools is None else options.tools
        answer = await self._complete([*self.messages, *new_messages], sampling, tools)
        if answer is None:
            return None
        reply: Message = {"role": "assistant", "content": answer.text}
        if answer.tool_calls:
            reply["tool_calls"] = [in_openai_form(call, call.id) for call in answer.tool_calls]
        self.messages += [*new_messages, reply]
        no_ids = np.zeros(0, np.int64)
        self.turns.append(
            Turn(
                prompt_ids=no_ids,
                response_ids=no_ids,
                logprobs=np.zeros(0, np.float32),
                finish_reason=answer.finish_reason,
                text=answer.text,
                starts_context=not self.turns,
                generate_s=answer.generate_s,
                sampling=sampling,
                messages=[*new_messages, reply],
            )
        )
        return reply

    def remaining_tokens(self) -> int:
        return NO_LIMIT

    async def close(self) -> None:
        """Does nothing: no server keeps state for this conversation."""
