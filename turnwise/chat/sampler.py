"""Samples the response after a prefix: encodes what is new, asks the server, checks the answer and makes the
Turn.

This is one step without a memory of its own. What has been said before comes in as a `Prefix`, and the prefix
with the response comes out. Who keeps the prefixes decides what a conversation is: a path
(`conversation.TokenConversation`) or a tree."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, get_args

from turnwise.chat.ledger import Prefix, Prompt
from turnwise.chat.message_content import Messages, continued, media_of, num_characters_of, text_of_last
from turnwise.chat.rendering import Tools
from turnwise.chat.replies import ReplyReader
from turnwise.chat.template import ChatTemplate
from turnwise.errors import RequestError, ServerError
from turnwise.protocols import PolicyServer
from turnwise.protocols.tools import ToolCallParser
from turnwise.types import CallOptions, Completion, FinishReason, Message, SamplingParams, Turn

_FINISH_REASONS = get_args(FinishReason)

NO_LIMIT = 2**31
"""More tokens than any context has room for."""

SamplingOf = Callable[["array[int]", int], SamplingParams]
"""Returns how the response to a prompt is sampled, given the ids of the prompt and how many tokens the
context has room for."""

OnPrompt = Callable[[Prompt, SamplingParams], None]
"""Called with each prompt before the server is asked."""


class ResponseRequest(NamedTuple):
    """What is new after a prefix, and how the response to it is sampled."""

    request_id: str
    """The server keeps a KV cache under this id."""
    messages: Messages
    """The new messages. If the last one is an assistant's, the response continues it."""
    tools: Tools
    sampling_of: SamplingOf
    number: int
    """Counts the responses of a conversation from 1. It is part of the ids of tool calls that have none of
    their own."""
    earlier: Messages | None = None
    """What was said in contexts that this request ends: the prompt of its new context repeats these messages
    before the new ones, and the server first forgets what it keeps under `request_id`. None = no context
    ends."""

    @property
    def prompt_messages(self) -> Messages:
        if self.earlier is None:
            return self.messages
        return [*self.earlier, *self.messages]


class Sampled(NamedTuple):
    """A response: its Turn, the prefix that ends with it, and its message."""

    turn: Turn
    prefix: Prefix
    reply: Message
    messages: Messages
    """The new messages and the response, as a prompt shows them again."""


class NoRoom(NamedTuple):
    """The context has no room for the messages and one token: nothing was sampled."""

    num_characters: int
    """Number of characters of the messages."""
    num_tokens: int | None
    """Number of tokens that the prompt would add; None if its text is so long that it wasn't encoded."""

    def refusal(self, max_length: int) -> RequestError:
        """What a client is told whose request has no room in `sequence_length`."""
        size = f"{self.num_tokens} tokens"
        if self.num_tokens is None:
            size = f"{self.num_characters} characters"
        return RequestError(
            f"the new messages of this request have {size} and leave no room for a response in "
            f"sequence_length {max_length}: send less, or raise sequence_length",
            "context_length_exceeded",
        )


@dataclass(frozen=True, slots=True)
class TokenSampler:
    """Samples responses in contexts of at most `max_length` tokens. With a `parser`, replies to requests with
    tools have `tool_calls` and `call_errors`."""

    template: ChatTemplate
    server: PolicyServer
    max_length: int
    parser: ToolCallParser | None = None
    on_prompt: OnPrompt | None = None

    async def sample_after(self, prefix: Prefix, request: ResponseRequest) -> Sampled | NoRoom:
        """Samples the response to what is new after `prefix`. Raises ChatTemplateError if the template
        refuses the messages; ServerError if the server can't serve the request, or its answer breaks the
        contract."""
        prompt = self._prompt(prefix, request)
        if isinstance(prompt, NoRoom):
            return prompt
        prompt_ids = prompt.token_ids()
        sampling = request.sampling_of(prompt_ids, self.max_length - len(prompt_ids))
        if request.earlier is not None:
            await self.server.release(request.request_id)
        if self.on_prompt is not None:
            self.on_prompt(prompt, sampling)
        media = [*prefix.media, *prompt.media]
        completion = await self.server.generate(prompt_ids, sampling, request.request_id, media)
        check_completion(completion, sampling, request.request_id)
        return self._sampled(prompt, request, sampling, completion)

    def _prompt(self, prefix: Prefix, request: ResponseRequest) -> Prompt | NoRoom:
        messages = request.prompt_messages
        num_characters = num_characters_of(messages)
        # A tokenizer takes minutes for a text of megabytes, and no deadline can end it.
        if num_characters > self.template.max_characters(self.max_length):
            return NoRoom(num_characters, None)
        added_ids = self._encoded(prefix, messages, request.tools)
        if prefix.num_tokens + len(added_ids) >= self.max_length:
            return NoRoom(num_characters, len(added_ids))
        return Prompt(prefix, array("q", added_ids), media_of(messages))

    def _encoded(self, prefix: Prefix, messages: Messages, tools: Tools) -> list[int]:
        if prefix.is_empty:
            return self.template.start(messages, tools)
        self.template.announce_rewrites(has_tools=bool(tools))
        return self.template.extend(prefix.response_ids.tolist(), messages, tools)

    def _sampled(
        self,
        prompt: Prompt,
        request: ResponseRequest,
        sampling: SamplingParams,
        completion: Completion,
    ) -> Sampled:
        response_ids = completion.token_ids.tolist()
        stop_token_ids = sampling.stop_token_ids
        reader = ReplyReader(self.template, self.parser)
        text = reader.text(response_ids, stop_token_ids)
        turn = prompt.turn(completion, sampling, text, text_of_last(request.messages))
        context, words = continued(request.messages)
        reply = reader.reply(response_ids, stop_token_ids, words, request.tools, request.number)
        turn.messages = [*context, reply.sampled]
        if prompt.prefix.is_empty:
            turn.tools = request.tools
        messages = [*context, reply.rendered]
        return Sampled(turn, prompt.answered(response_ids), reply.message, messages)


def check_completion(completion: Completion, sampling: SamplingParams, request_id: str) -> None:
    """Raises ServerError if a server's answer breaks the contract: too many tokens, an unknown finish reason,
    or a stop without the stop token."""
    token_ids = completion.token_ids
    reason = completion.finish_reason
    if len(token_ids) > sampling.max_new_tokens:
        raise ServerError(
            f"the server answered {request_id!r} with {len(token_ids)} tokens, more than the "
            f"{sampling.max_new_tokens}"
        )
    if reason not in _FINISH_REASONS:
        raise ServerError(
            f"finish reason {reason!r} of {request_id!r}; allowed: {', '.join(_FINISH_REASONS)}"
        )
    ends_on_stop_token = len(token_ids) > 0 and int(token_ids[-1]) in sampling.stop_token_ids
    if reason == "stop" and not ends_on_stop_token and not sampling.stop_strings:
        raise ServerError(
            f"the response to {request_id!r} finished with `stop` but holds no stop token: a server must "
            "keep the stop token that was sampled, since the policy is trained to sample it"
        )


def sampling_of_call(
    sampling: SamplingParams,
    options: CallOptions,
    seed: int,
    room: int = NO_LIMIT,
) -> SamplingParams:
    """The parameters of one call: those of its context, changed by its options, with a budget that the
    context has room for."""
    max_new_tokens = sampling.max_new_tokens if options.max_new_tokens is None else options.max_new_tokens
    budget = min(max_new_tokens, sampling.max_new_tokens, room)
    temperature = sampling.temperature if options.temperature is None else options.temperature
    stop_strings = sampling.stop_strings if options.stop is None else tuple(options.stop)
    # Positional arguments in the order of the fields, since `replace` takes three times as long.
    unchanged = (
        sampling.top_p,
        sampling.top_k,
        sampling.min_p,
        sampling.repetition_penalty,
        sampling.stop_token_ids,
    )
    return SamplingParams(budget, temperature, *unchanged, stop_strings, sampling.do_sample, seed)
