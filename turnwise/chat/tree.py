"""Conversations of clients that send their whole history with each request: one `ConversationTree` an
episode, over one ledger (docs/design/tree.md)."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from turnwise.chat.forest import Forest, Node, RequestKey, Running, Usage
from turnwise.chat.ledger import EMPTY, Ledger, Prefix
from turnwise.chat.message_content import Messages
from turnwise.chat.message_keys import (
    History,
    canonical,
    key_of_reply,
    late_systems_as_users,
    read_history,
    read_tools,
)
from turnwise.chat.prompt_seeds import PromptSeeds
from turnwise.chat.rendering import Tools
from turnwise.chat.replies import finish_reason_of, until_stop
from turnwise.chat.sampler import (
    NoRoom,
    ResponseRequest,
    Sampled,
    SamplingOf,
    TokenSampler,
    sampling_of_call,
)
from turnwise.chat.template import ChatTemplate
from turnwise.errors import ChatTemplateError, RequestError, ServerError
from turnwise.protocols import PolicyServer
from turnwise.protocols.tools import ToolCallParser
from turnwise.spec import MatchRule
from turnwise.types import (
    AS_OPENED,
    CallOptions,
    Limit,
    Message,
    SamplingParams,
    Status,
    Task,
    Trajectory,
    Turn,
)

logger = logging.getLogger(__name__)


class Answer(NamedTuple):
    """The answer to a request. Its response counts once it has been given to `ConversationTree.deliver`."""

    message: Message
    turn: Turn
    finish_reason: str
    """`stop`, `length` or `tool_calls`."""
    usage: Usage
    node: int
    """Index of the turn."""


OnCommit = Callable[[Answer, Messages], None]
"""Called with a new answer, and the messages that its turn added to the context."""


class _Request(NamedTuple):
    key: RequestKey
    history: History
    tools: Tools
    running: Running


class ConversationTree:
    """Answers requests that each have the whole history, any number at once. A request continues the response
    that it sends back; its new messages are an extension of the ids that were sampled. If it sends back none,
    or the template can't extend exactly, a new context starts.

    `match`: whether a client may leave out the thinking, and the text beside calls, of what it sends back
    (`omitted`) or not (`exact`). `max_turns` is the maximum number of responses; None = no limit. Without
    `encode_special_tokens`, special tokens that are spelt out in messages stay ordinary text. `on_commit` is
    called with each new answer.

    >>> from turnwise.testing.fakes import ScriptedServer, byte_tokenizer
    >>> template = ChatTemplate(byte_tokenizer())
    >>> server = ScriptedServer([template.respond("left"), template.respond("right")])
    >>> tree = ConversationTree(template, server, "episode-0", SamplingParams(max_new_tokens=16), 256)
    >>> go = {"role": "user", "content": "go"}
    >>> again = {"role": "user", "content": "again"}
    >>> async def play():
    ...     first = await tree.answer([go])
    ...     second = await tree.answer([go, first.message, again])
    ...     return second.message, second.turn.parent, second.usage.reused
    >>> asyncio.run(play())
    ({'role': 'assistant', 'content': 'right'}, 0, 26)
    """

    def __init__(
        self,
        template: ChatTemplate,
        server: PolicyServer,
        name: str,
        sampling: SamplingParams,
        max_length: int,
        *,
        parser: ToolCallParser | None = None,
        match: MatchRule = "omitted",
        max_turns: int | None = None,
        encode_special_tokens: bool = False,
        on_commit: OnCommit | None = None,
    ) -> None:
        stop_token_ids = dict.fromkeys([*sampling.stop_token_ids, *template.stop_token_ids])
        if not encode_special_tokens:
            template = template.of_clients
        self.name = name
        self.template = template
        self.max_length = max_length
        self.limit: Limit | None = None
        """The limit that refused the newest request, if one did."""
        self.counts: Counter[str] = Counter()
        """Numbers of requests, of contexts by the reason why they started, and of replayed answers."""
        self._sampler = TokenSampler(template, server, max_length, parser)
        self._sampling = replace(sampling, stop_token_ids=tuple(stop_token_ids))
        self._max_turns = max_turns
        self._on_commit = on_commit
        self._ledger = Ledger(name)
        self.turns = self._ledger.turns
        self._forest = Forest(is_exact=match == "exact")
        self._running: dict[RequestKey, list[Running]] = {}
        self.num_running = 0
        self._seeds = PromptSeeds(sampling.seed)
        self._request_ids: list[str] = []
        self._has_warned = False
        self._is_closed = False

    async def answer(
        self,
        messages: Messages,
        options: CallOptions = AS_OPENED,
        tools: Tools = (),
        *,
        is_retry: bool = False,
        is_trained: bool = True,
        choice: int = 0,
    ) -> Answer:
        """Answers a request. `is_retry`: whether the client says that it sends the request again; such a
        request waits for its twin if that is still being sampled. The response is trained on if
        `is_trained` and if it is delivered. If the caller is cancelled, sampling goes on: the answer waits
        for the request to come again. `choice` tells the answers apart that a client wants to one request.

        Raises RequestError if the request can't be answered as it is; ServerError if the server can't serve
        it, or its answer breaks the contract. Then nothing is added."""
        if self._is_closed:
            raise self._ended()
        history = read_history(messages)
        tools = read_tools(tools)
        root = canonical(tools, "tools")
        history = History(self._forest.shared(history.keys))
        key = RequestKey(root, history.keys, replace(options, tools=None), is_trained, choice)
        self._forest.note_request(key)
        self.counts["requests"] += 1
        node = self._forest.undelivered(key, is_retry)
        if node is None:
            node = await self._sampled_answer(_Request(key, history, tools, Running()), is_retry)
        else:
            self.counts["replayed"] += 1
        node.num_writers += 1
        return self._answer_of(node)

    def deliver(self, answer: Answer) -> None:
        """Notes that the last byte of an answer has been written."""
        node = self._forest.nodes[answer.node]
        node.num_writers -= 1
        self._forest.note_delivered(node)

    def drop(self, answer: Answer) -> None:
        """Notes that the client was lost before the last byte of the answer was written: the answer waits for
        the request to come again."""
        self._forest.nodes[answer.node].num_writers -= 1

    def trajectory(self, task: Task, sibling: int) -> Trajectory:
        """The episode so far. Turns that no client has got aren't trained on."""
        for node in self._forest.nodes:
            turn = self.turns[node.turn]
            turn.is_trained = node.is_delivered and node.request.is_trained and not turn.is_greedy
        self.counts["undelivered"] = sum(not node.is_delivered for node in self._forest.nodes)
        status: Status = "truncated" if self.limit else "finished"
        return Trajectory(
            task,
            sibling,
            self.turns,
            status=status,
            limit=self.limit,
            contexts_are="parts",
            answer_turn=self._forest.answer_turn(),
        )

    def verify(self) -> None:
        """Raises RolloutError if the ids of a turn were changed, or a turn was lost or moved."""
        self._ledger.verify()

    async def close(self) -> None:
        """Ends running requests and lets the server forget all contexts; the turns stay."""
        if self._is_closed:
            return
        self._is_closed = True
        tasks = [running.task for same in self._running.values() for running in same]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for request_id in self._request_ids:
            await self._sampler.server.release(request_id)

    async def _sampled_answer(self, request: _Request, is_retry: bool) -> Node:
        same = self._running.get(request.key)
        if is_retry and same:
            running = same[-1]
            self.counts["replayed"] += 1
        else:
            self._check_turns()
            running = request.running
            # The request may outlive its client, whose retry then gets the answer.
            running.task = asyncio.create_task(self._sample(request), name=f"request of {self.name}")
            running.task.add_done_callback(lambda _: self._end(request))
            self._running.setdefault(request.key, []).append(running)
            self.num_running += 1
        running.num_waiting += 1
        try:
            return await asyncio.shield(running.task)
        except asyncio.CancelledError:
            if self._is_closed:
                raise self._ended() from None
            raise
        finally:
            running.num_waiting -= 1

    def _ended(self) -> RequestError:
        return RequestError(f"{self.name!r} has ended: it takes no more requests", "session_ended")

    def _answer_of(self, node: Node) -> Answer:
        return Answer(
            node.message,
            self.turns[node.turn],
            node.finish_reason,
            node.usage,
            node.turn,
        )

    def _end(self, request: _Request) -> None:
        self.num_running -= 1
        same = self._running[request.key]
        same.remove(request.running)
        if not same:
            del self._running[request.key]
        task = request.running.task
        if not task.cancelled() and (fault := task.exception()) and not request.running.num_waiting:
            logger.warning("%s: a request whose client was lost failed: %s", self.name, fault)

    def _check_turns(self) -> None:
        # A request that has just ended is among the turns already.
        running = [running for same in self._running.values() for running in same]
        num_turns = len(self.turns) + sum(not request.task.done() for request in running)
        if self._max_turns is not None and num_turns >= self._max_turns:
            self.limit = "max_steps"
            raise RequestError(
                f"{self.name!r} has had {num_turns} responses, and agent.max_assistant_turns is "
                f"{self._max_turns}: end the episode, or raise it",
                "turn_limit",
            )

    async def _sample(self, request: _Request) -> Node:
        """Samples the response to a request, after the node that it continues, and commits it. If the
        template can't extend that node exactly, all messages make a new context."""
        parent = self._forest.match(request.key)
        if parent is not None:
            try:
                return await self._sample_after(parent, request)
            except ChatTemplateError as fault:
                logger.debug("%s: a context is not extended: %s", self.name, fault)
        try:
            node = await self._sample_after(None, request)
        except ChatTemplateError as fault:
            raise RequestError(str(fault)) from fault
        self.counts[f"contexts/{self._forest.reason(node, parent)}"] += 1
        return node

    async def _sample_after(self, parent: Node | None, request: _Request) -> Node:
        """Samples after `parent`, or anew, and commits. Raises ChatTemplateError if the template refuses
        that."""
        request_id = self._request_id(parent)
        sampled = None
        try:
            sampled = await self._sampled(parent, request, request_id)
        finally:
            if sampled is None and parent is not None and parent.request_id == request_id:
                parent.is_continued = False
        return self._commit(request, parent, request_id, sampled)

    def _request_id(self, parent: Node | None) -> str:
        """The id under which the server keeps the context: that of a tip that is continued, else a new
        one."""
        if parent is not None and not parent.is_continued:
            parent.is_continued = True
            return parent.request_id
        request_id = f"{self.name}/{len(self._request_ids)}"
        self._request_ids.append(request_id)
        return request_id

    async def _sampled(self, parent: Node | None, request: _Request, request_id: str) -> Sampled:
        if parent is None:
            messages = request.history.messages()
        else:
            messages = request.history.messages(parent.end + 1, parent.call_ids)
        try:
            return await self._response(parent, request, request_id, messages)
        except ChatTemplateError:
            # Many templates refuse a system message in mid-conversation.
            as_users = late_systems_as_users(messages, is_start=parent is None)
            if as_users == messages:
                raise
            sampled = await self._response(parent, request, request_id, as_users)
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s: the chat template takes no system message in mid-conversation; it became a user's",
                self.name,
            )
        return sampled

    async def _response(
        self, parent: Node | None, request: _Request, request_id: str, messages: Messages
    ) -> Sampled:
        prefix = EMPTY
        parent_turn = None
        if parent is not None:
            prefix = self._ledger.prefix(parent.turn)
            parent_turn = parent.turn
        new = ResponseRequest(
            request_id=request_id,
            messages=messages,
            tools=request.tools,
            sampling_of=self._sampling_of(parent_turn, prefix, request.key.options),
            # It is part of the ids of calls, and must depend on the messages alone.
            number=request.history.num_answers + 1,
        )
        sampled = await self._sampler.sample_after(prefix, new)
        if isinstance(sampled, NoRoom):
            self.limit = "sequence_length"
            raise sampled.refusal(self.max_length)
        if sampled.turn.finish_reason == "aborted":
            raise ServerError(f"the server aborted a request of {self.name!r}")
        return sampled

    def _sampling_of(self, parent: int | None, prefix: Prefix, options: CallOptions) -> SamplingOf:
        def of_prompt(prompt_ids: array[int], room: int) -> SamplingParams:
            seed = self._seeds.seed(prompt_ids, parent, prefix.num_tokens)
            return sampling_of_call(self._sampling, options, seed, room)

        return of_prompt

    def _commit(self, request: _Request, parent: Node | None, request_id: str, sampled: Sampled) -> Node:
        key = request.key
        message = until_stop(sampled.reply, key.options.stop or ())
        start = 0
        reused = 0
        parent_turn = None
        call_ids = request.history.call_ids()
        if parent is not None:
            start = parent.end + 1
            reused = self._ledger.prefix(parent.turn).num_tokens
            parent_turn = parent.turn
            call_ids = request.history.call_ids(parent.call_ids)
        call_ids += [call["id"] for call in message.get("tool_calls") or ()]
        num_response = len(sampled.turn.response_ids)
        node = Node(
            turn=len(self.turns),
            request=key,
            added_keys=key.keys[start:],
            message=message,
            reply=key_of_reply(message),
            call_ids=tuple(call_ids),
            request_id=request_id,
            finish_reason=finish_reason_of(sampled.turn, message),
            usage=Usage(sampled.prefix.num_tokens - num_response, reused, num_response),
            running=request.running,
        )
        self._seeds.add(parent_turn, sampled.prefix)
        self._ledger.commit(sampled.turn, sampled.prefix, parent_turn, sampled.messages)
        if parent is not None and self.turns[parent.turn].tool_results is None:
            self.turns[parent.turn].tool_results = parent.results_in(node.added_keys)
        self._forest.add(node, parent)
        self.limit = None
        if self._on_commit is not None:
            self._on_commit(self._answer_of(node), sampled.messages[:-1])
        return node
