"""The sampled responses of a `ConversationTree`, and which of them a request continues."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from turnwise.chat.message_keys import MessageKey, is_sent_back
from turnwise.types import CallOptions, Message


class Usage(NamedTuple):
    """Numbers of tokens of a request."""

    prompt: int
    reused: int
    """Tokens of the prompt that an earlier response of its context had as prompt or response."""
    response: int


class RequestKey(NamedTuple):
    """What makes two requests the same."""

    root: str
    keys: tuple[MessageKey, ...]
    options: CallOptions
    is_trained: bool
    choice: int = 0
    """Counts the answers that a client wants to one request from 0."""


@dataclass(slots=True, eq=False)
class Node:
    """One sampled response."""

    turn: int
    request: RequestKey
    added_keys: tuple[MessageKey, ...]
    """The keys of the messages between the node that this one continues and the response."""
    message: Message
    reply: MessageKey
    call_ids: tuple[str, ...]
    """The ids of all calls of its path, in order."""
    request_id: str
    finish_reason: str
    usage: Usage
    running: Running
    """The request that sampled it."""
    children: Children = field(default_factory=dict)
    is_continued: bool = False
    is_delivered: bool = False
    num_writers: int = 0
    """Number of clients that are being sent the answer."""
    start: int = field(init=False)
    """Number of messages before those that were added."""
    end: int = field(init=False)
    """Number of messages before the response."""

    def __post_init__(self) -> None:
        self.end = len(self.request.keys)
        self.start = self.end - len(self.added_keys)

    def results_in(self, keys: Sequence[MessageKey]) -> tuple[str, ...] | None:
        """The results of the response's calls among the messages after it, in the order of the calls; None if
        there are none."""
        first = len(self.call_ids) - len(self.reply.calls)
        results = {key.answered: key.text for key in keys if key.answered is not None}
        positions = range(first, len(self.call_ids))
        if results.keys().isdisjoint(positions):
            return None
        return tuple(results.get(position, "") for position in positions)


Opening = tuple[str, MessageKey]
"""The tools and the first message of a conversation."""

Children = dict[MessageKey, list[Node]]
"""Nodes that continue the same response, or start contexts, by the first message that each of them added."""


@dataclass(slots=True, eq=False)
class Running:
    """A request that is being sampled, and the number of those who wait for it."""

    task: asyncio.Task[Node] = field(init=False)
    num_waiting: int = 0


class Forest:
    """The nodes of an episode. Roots are split by the tools of their requests. `is_exact`: whether a client
    must send a response back with its thinking and the text beside calls."""

    def __init__(self, is_exact: bool) -> None:
        self.nodes: list[Node] = []
        """All nodes; the index of a node is that of its turn."""
        self._is_exact = is_exact
        self._roots: dict[str, Children] = {}
        self._undelivered: dict[RequestKey, list[Node]] = {}
        self._keys: dict[MessageKey, MessageKey] = {}
        self._num_by_history: Counter[tuple[str, tuple[MessageKey, ...]]] = Counter()
        self._num_by_opening: Counter[Opening] = Counter()
        self._num_by_first: Counter[MessageKey] = Counter()
        self._openings: dict[Opening, None] = {}
        """The openings of all requests, in the order in which they arrived."""

    def shared(self, keys: Sequence[MessageKey]) -> tuple[MessageKey, ...]:
        """The keys, with the nodes' own in place of equal ones: clients send the same texts again and again,
        which so are kept once, and are compared by identity."""
        return tuple(self._keys.get(key, key) for key in keys)

    def note_request(self, request: RequestKey) -> None:
        """Notes that a request has arrived. It may be answered after later ones, or never."""
        self._openings.setdefault(_opening(request))

    def add(self, node: Node, parent: Node | None) -> None:
        """Adds a node that continues `parent`. A client that sends a response back has got it."""
        request = node.request
        children = self._roots.setdefault(request.root, {}) if parent is None else parent.children
        children.setdefault(node.added_keys[0], []).append(node)
        self.nodes.append(node)
        self._undelivered.setdefault(request, []).append(node)
        for key in (*node.added_keys, node.reply):
            self._keys.setdefault(key, key)
        self._num_by_history[request.root, request.keys] += 1
        self._num_by_opening[_opening(request)] += 1
        self._num_by_first[request.keys[0]] += 1
        if parent is not None:
            self.note_delivered(parent)

    def match(self, request: RequestKey) -> Node | None:
        """The deepest node whose path begins the request; of several the one sampled last."""
        keys = request.keys
        best: Node | None = None
        candidates = _added_first(self._roots.get(request.root, {}), keys, 0)
        while candidates:
            node = candidates.pop()
            end = node.end
            is_before = end < len(keys) and keys[node.start : end] == node.added_keys
            if not is_before or not is_sent_back(node.reply, keys[end], self._is_exact):
                continue
            if best is None or _rank(node) > _rank(best):
                best = node
            candidates += _added_first(node.children, keys, end + 1)
        return best

    def undelivered(self, request: RequestKey, is_retry: bool) -> Node | None:
        """The oldest answer to this request that no client has got. If one is being sent it, only a retry
        gets it too."""
        for node in self._undelivered.get(request, ()):
            is_on_its_way = node.num_writers > 0 or node.running.num_waiting > 0
            if is_retry or not is_on_its_way:
                return node
        return None

    def note_delivered(self, node: Node) -> None:
        if node.is_delivered:
            return
        node.is_delivered = True
        waiting = self._undelivered[node.request]
        waiting.remove(node)
        if not waiting:
            del self._undelivered[node.request]

    def reason(self, node: Node, matched: Node | None) -> str:
        """Why a node, the newest one, starts a context."""
        if matched is not None:
            return "template"
        request = node.request
        if self._num_by_history[request.root, request.keys] > 1:
            return "repeat"
        if self._num_by_opening[_opening(request)] > 1:
            return "changed"
        return "tools" if self._num_by_first[request.keys[0]] > 1 else "first"

    def answer_turn(self) -> int | None:
        """The turn of the final answer: the newest delivered one of the conversation that the first request
        with an answer opened. It has that request's tools and first message. None if nothing was delivered
        there."""
        answered = {_opening(node.request) for node in self.nodes}
        first = next((opening for opening in self._openings if opening in answered), None)
        turns = [node.turn for node in self.nodes if node.is_delivered and _opening(node.request) == first]
        return max(turns, default=None)


def _added_first(children: Children, keys: Sequence[MessageKey], position: int) -> list[Node]:
    """The nodes whose first added message is the one at this position."""
    if position >= len(keys):
        return []
    return list(children.get(keys[position], ()))


def _rank(node: Node) -> tuple[int, bool, int]:
    return node.end, node.is_delivered, node.turn


def _opening(request: RequestKey) -> Opening:
    return request.root, request.keys[0]
