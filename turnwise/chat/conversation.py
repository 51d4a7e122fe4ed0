"""Conversations: `TokenConversation` keeps exactly the token ids of one context as the server saw them, `TokenContexts` opens
the contexts of an episode, and `TextConversation` talks to a text-in, text-out model."""

import logging
import re
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, get_args

import numpy as np

from turnwise.chat.rendering import Tools, num_characters_of
from turnwise.chat.template import ChatTemplate
from turnwise.chat.turn_ends import continued
from turnwise.errors import RolloutError, ServerError
from turnwise.protocols import PolicyServer
from turnwise.tool_protocols import ReadsTurnTokens, ToolCall, ToolCallParser
from turnwise.types import AS_OPENED, CallOptions, Completion, FinishReason, Media, Message, SamplingParams, Turn, derive_seed

logger = logging.getLogger(__name__)

_FINISH_REASONS = get_args(FinishReason)
_NO_LIMIT = 2**31
_CALL_ID = re.compile(r"[A-Za-z0-9]{9}")


class TokenConversation:
    """A Conversation over a PolicyServer. Ids are only appended. Each response adds a Turn. `generate` calls mustn't overlap.

    `max_length` is the size of the context in tokens (`sequence_length`). Turn k samples with a seed derived from
    `sampling.seed` and k, so no response depends on what else the server is doing. If an agent rewrote history, `parent` is
    the index of the turn at which this context branches off; the first Turn records it. `opens_episode` marks the episode's
    first context: there a first prompt that is too long raises RolloutError, while in a later context `generate` returns None.
    `tools` are the schemas that the first prompt shows; the `parser` reads tool calls from the responses.

    >>> import asyncio
    >>> from turnwise.testing.fakes import ScriptedServer, byte_tokenizer
    >>> template = ChatTemplate(byte_tokenizer())
    >>> server = ScriptedServer([template.respond("Right")])
    >>> conversation = TokenConversation(template, server, "episode-0", SamplingParams(max_new_tokens=16), max_length=256)
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
    ) -> None:
        stop_token_ids = tuple(dict.fromkeys([*sampling.stop_token_ids, *template.stop_token_ids]))
        self.turns: list[Turn] = []
        self.request_id = request_id
        self._template = template
        self._server = server
        self._sampling = replace(sampling, stop_token_ids=stop_token_ids)
        self._max_length = max_length
        self._parent = parent
        self._tools = tools
        self._parser = parser
        self._opens_episode = opens_episode
        self._is_closed = False
        self._ended: list[array[int]] = []  # ids of the contexts that a change of `tools` ended
        # Not a list, since the garbage collector would scan every entry of a list again and again.
        self._context_ids = array("q")
        self._media: list[Media] = []

    async def generate(self, new_messages: Sequence[Message], options: CallOptions = AS_OPENED) -> Message | None:
        """Adds the messages, samples a response and returns it as an assistant message. With tools and a parser, this message
        has `tool_calls`, in OpenAI's form, and `call_errors`, a sentence for each call that can't be read. If `options` names
        other tools than before, a new context starts, whose prompt is the whole conversation.

        If the last message is an assistant's, the response continues it. The recorded message then has all its words, the
        returned one only those that were sampled.

        Returns None if the context has no room for the messages and one sampled token; then nothing is added or sampled.
        Nothing is added either if the server refuses the request. Raises ChatTemplateError if the template refuses the
        messages; RolloutError if the episode's first prompt leaves no room in its context, or the conversation is closed;
        ServerError if the server can't serve the request, or its answer breaks the contract."""
        if self._is_closed:
            raise RolloutError(f"{self.request_id!r} is closed: open another context to say more")
        tools = self._tools if options.tools is None else options.tools
        is_anew = bool(self.turns) and list(tools) != list(self._tools)
        messages = [*(said for turn in self.turns for said in turn.messages), *new_messages] if is_anew else new_messages
        before = array("q") if is_anew else self._context_ids
        room, num_characters = self._max_length - len(before), num_characters_of(messages)
        # A tokenizer takes minutes for a text of megabytes, and no deadline can end it.
        is_too_long = num_characters > self._template.max_characters(self._max_length)
        added_ids = [] if is_too_long else self._encode(messages, tools, is_anew)
        room -= len(added_ids)
        if is_too_long or room < 1:
            if self._opens_episode and not self.turns:
                size = f"{num_characters} characters" if is_too_long else f"{len(added_ids)} tokens"
                raise RolloutError(
                    f"the first prompt of {self.request_id!r} has {size} and leaves no room for a response in "
                    f"sequence_length {self._max_length}: raise sequence_length or shorten the prompt's templates"
                )
            if is_too_long or len(added_ids) >= self._max_length:
                logger.warning(
                    "%s: an observation of %d characters ends its context and fits into no other one: shorten it in the "
                    "environment, or raise sequence_length (%d)",
                    self.request_id,
                    num_characters,
                    self._max_length,
                )
            return None
        sampling = _of_turn(self._sampling, len(self.turns), options, room)
        new_media = _media_of(messages)
        prompt_ids = before + array("q", added_ids)
        media = [*([] if is_anew else self._media), *new_media]
        if is_anew:
            await self._server.release(self.request_id)
        completion = await self._server.generate(prompt_ids, sampling, self.request_id, media)
        self._check(completion, sampling)

        token_ids = completion.token_ids.tolist()
        if is_anew:
            self._ended.append(self._context_ids)
        turn = Turn(
            prompt_ids=np.array(added_ids, dtype=np.int64),
            response_ids=completion.token_ids.astype(np.int64),
            logprobs=np.array(completion.logprobs, np.float32),
            versions=completion.versions,
            finish_reason=completion.finish_reason,
            text=self._text(token_ids),
            observation=_text_of(new_messages),
            media=new_media,
            starts_context=is_anew or not self.turns,
            parent=None if self.turns else self._parent,
            is_greedy=sampling.is_greedy,
            generate_s=completion.generate_s,
            kept_ids=completion.kept_ids,
            kept_offsets=completion.kept_offsets,
            sampling=sampling,
        )
        self.turns.append(turn)
        self._context_ids = prompt_ids + array("q", token_ids)
        self._media, self._tools = media, tools
        context, words = continued(new_messages)
        reply = {"role": "assistant", "content": turn.text, **self._calls(token_ids, words)}
        turn.messages = [*context, {**reply, "content": words + turn.text}]
        return reply

    def remaining_tokens(self) -> int:
        """Tokens that the context still has room for."""
        return self._max_length - len(self._context_ids)

    async def close(self) -> None:
        """Lets the server forget the context; the turns stay."""
        if not self._is_closed:
            await self._server.release(self.request_id)
            self._is_closed = True

    def verify(self) -> None:
        """Raises RolloutError if the ids of a turn were changed, or a turn was lost or moved: the concatenated ids of the turns
        of each context must be the last prompt that the server saw there, followed by its response."""
        recorded = np.concatenate([np.zeros(0, np.int64), *(ids for t in self.turns for ids in (t.prompt_ids, t.response_ids))])
        seen = np.concatenate([np.array(ids, np.int64) for ids in (*self._ended, self._context_ids)])
        if np.array_equal(recorded, seen):
            return
        length = min(len(recorded), len(seen))
        first = next(iter(np.flatnonzero(recorded[:length] != seen[:length])), length)
        raise RolloutError(
            f"the turns of {self.request_id!r} hold {len(recorded)} tokens and the server saw {len(seen)}; they "
            f"differ from position {first} on: turns may be annotated, their ids never changed"
        )

    def _encode(self, messages: Sequence[Message], tools: Tools, is_anew: bool) -> list[int]:
        if is_anew or not self.turns:
            return self._template.start(messages, tools)
        self._template.announce_rewrites(has_tools=bool(tools))
        return self._template.extend(self.turns[-1].response_ids.tolist(), messages, tools)

    def _text(self, response_ids: list[int], skips_turn_tokens: bool = True) -> str:
        is_stopped = bool(response_ids) and response_ids[-1] in self._sampling.stop_token_ids
        return self._template.decode(response_ids[:-1] if is_stopped else response_ids, skips_turn_tokens)

    def _calls(self, response_ids: list[int], words: str) -> Message:
        """The `tool_calls` and `call_errors` of a response that continues `words`; {} without tools or parser. In some families
        of models the tokens of turns also mark calls; their parser asks for them."""
        if self._parser is None or not self._tools:
            return {}
        needs_turn_tokens = isinstance(self._parser, ReadsTurnTokens) and self._parser.reads_turn_tokens
        parsed = self._parser.parse(words + self._text(response_ids, not needs_turn_tokens), self._tools)
        # Mistral's template takes only ids of nine letters and digits. The model's own ids are kept if they all have that form.
        said = [call.id for call in parsed.tool_calls]
        is_kept = all(_CALL_ID.fullmatch(call_id) for call_id in said) and len(set(said)) == len(said)
        ids = said if is_kept else [f"t{len(self.turns):03d}c{index:04d}" for index in range(len(said))]
        calls = [
            {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for call_id, call in zip(ids, parsed.tool_calls, strict=True)
        ]
        return {"tool_calls": calls, "call_errors": list(parsed.errors)}

    def _check(self, completion: Completion, sampling: SamplingParams) -> None:
        token_ids, reason = completion.token_ids, completion.finish_reason
        if len(token_ids) > sampling.max_new_tokens:
            raise ServerError(
                f"the server answered {self.request_id!r} with {len(token_ids)} tokens, more than the {sampling.max_new_tokens}"
            )
        if reason not in _FINISH_REASONS:
            raise ServerError(f"finish reason {reason!r} of {self.request_id!r}; allowed: {', '.join(_FINISH_REASONS)}")
        ends_on_stop_token = len(token_ids) > 0 and int(token_ids[-1]) in sampling.stop_token_ids
        if reason == "stop" and not ends_on_stop_token and not sampling.stop_strings:
            raise ServerError(
                f"the response to {self.request_id!r} finished with `stop` but holds no stop token: a server must keep the "
                "stop token that was sampled, since the policy is trained to sample it"
            )


def _of_turn(sampling: SamplingParams, number: int, options: CallOptions, room: int = _NO_LIMIT) -> SamplingParams:
    asked = sampling.max_new_tokens if options.max_new_tokens is None else options.max_new_tokens
    budget = min(asked, sampling.max_new_tokens, room)
    temperature = sampling.temperature if options.temperature is None else options.temperature
    stop_strings = sampling.stop_strings if options.stop is None else tuple(options.stop)
    # Positional arguments in the order of the fields, since `replace` takes three times as long.
    same = (sampling.top_p, sampling.top_k, sampling.min_p, sampling.repetition_penalty, sampling.stop_token_ids)
    return SamplingParams(budget, temperature, *same, stop_strings, sampling.do_sample, derive_seed(sampling.seed, number))


def _media_of(messages: Sequence[Message]) -> tuple[Media, ...]:
    """The images in the messages' parts `{"type": "image", "image": Media or uint8 [H, W, 3]}`, in order."""
    images = [part.get("image") for part in _parts(messages) if part.get("type") == "image"]
    return tuple(image if isinstance(image, Media) else Media("image", np.asarray(image, np.uint8)) for image in images)


def _text_of(messages: Sequence[Message]) -> str:
    content = messages[-1]["content"] if messages else ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in _parts(messages[-1:]))


def _parts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [part for message in messages if isinstance(message.get("content"), list) for part in message["content"]]


@dataclass(frozen=True)
class TokenContexts:
    """Opens the conversations of one episode over one server. `episode_id` must be unique among running episodes, since servers
    keep KV caches under request ids that begin with it. The `parser` reads tool calls in contexts opened with tools."""

    template: ChatTemplate
    server: PolicyServer
    max_length: int
    episode_id: str
    parser: ToolCallParser | None = None
    _conversations: list[TokenConversation] = field(init=False, default_factory=list)

    def __call__(
        self,
        sampling: SamplingParams,
        *,
        parent: int | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        encode_special_tokens: bool = True,
    ) -> TokenConversation:
        index = len(self._conversations)
        request_id = f"{self.episode_id}/{index}"
        # The index of a turn counts from 0 in each context, so the contexts of an episode need seeds of their own.
        sampling = replace(sampling, seed=derive_seed(sampling.seed, "context", index))
        conversation = TokenConversation(
            self.template if encode_special_tokens else self.template.without_special_tokens,
            self.server,
            request_id,
            sampling,
            self.max_length,
            parent=parent,
            tools=tools,
            parser=self.parser,
            opens_episode=index == 0,
        )
        self._conversations.append(conversation)
        return conversation

    def verify(self) -> None:
        """Raises RolloutError unless the turns of every context have the ids that the server saw. Call it before `close`."""
        for conversation in self._conversations:
            conversation.verify()

    async def close(self) -> None:
        for conversation in self._conversations:
            await conversation.close()
        self._conversations.clear()


class TextAnswer(NamedTuple):
    """The answer of a text-in, text-out model."""

    text: str
    finish_reason: FinishReason
    generate_s: float = 0.0
    tool_calls: tuple[ToolCall, ...] = ()


Complete = Callable[[Sequence[Message], SamplingParams, Tools], Awaitable[TextAnswer | None]]
"""Called with all messages so far, the sampling parameters and the tools' schemas. Returns None if no answer is left."""


class TextConversation:
    """A Conversation with a model that reads and writes text. Its turns have no tokens, and its context length is unknown.

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

    async def generate(self, new_messages: Sequence[Message], options: CallOptions = AS_OPENED) -> Message | None:
        num_characters_of(new_messages)  # raises ChatTemplateError if these are no messages
        sampling = _of_turn(self._sampling, len(self.turns), options)
        tools = self._tools if options.tools is None else options.tools
        answer = await self._complete([*self.messages, *new_messages], sampling, tools)
        if answer is None:
            return None
        reply: Message = {"role": "assistant", "content": answer.text}
        if answer.tool_calls:
            functions = [(call.id, {"name": call.name, "arguments": call.arguments}) for call in answer.tool_calls]
            reply["tool_calls"] = [{"id": call_id, "type": "function", "function": called} for call_id, called in functions]
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
        return _NO_LIMIT

    async def close(self) -> None:
        """Does nothing: no server keeps state for this conversation."""
