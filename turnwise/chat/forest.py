"""The sampled responses of a `ConversationTree`, and which of them a request continues."""

from __future__ import annotations

import asyncio
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
    children: list[Node] = field(default_factory=list)
    is_continued: bool = False
    is_delivered: bool = False
    num_writers: int = 0
    """Number of clients that are being sent the answer."""

    @property
    def start(self) -> int:
        """Number of messages before those that were added."""
        return self.end - len(self.added_keys)

    @property
    def end(self) -> int:
        """Number of messages before the response."""
        return len(self.request.keys)

    def results_in(self, keys: Sequence[MessageKey]) -> tuple[str, ...] | None:
        """The results of the response's calls among the messages after it, in the order of the calls; None if
        there are none."""
        first = len(self.call_ids) - len(self.reply.calls)
        results = {key.answered: key.text for key in keys if key.answered is not None}
        positions = range(first, len(self.call_ids))
        if results.keys().isdisjoint(positions):
            return None
        return tuple(results.get(position, "") for position in positions)


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
        self._roots: dict[str, list[Node]] = {}
        self._undelivered: dict[RequestKey, list[Node]] = {}

    def add(self, node: Node, parent: Node | None) -> None:
        """Adds a node that continues `parent`. A client that sends a response back has got it."""
        siblings = self._roots.setdefault(node.request.root, []) if parent is None else parent.children
        siblings.append(node)
        self.nodes.append(node)
        self._undelivered.setdefault(node.request, []).append(node)
        if parent is not None:
            self.note_delivered(parent)

    def match(self, request: RequestKey) -> Node | None:
        """The deepest node whose path begins the request; of several the one sampled last."""
        keys = request.keys
        best: Node | None = None
        candidates = list(self._roots.get(request.root, ()))
        while candidates:
            node = candidates.pop()
            is_before = node.end < len(keys) and keys[node.start : node.end] == node.added_keys
            if not is_before or not is_sent_back(node.reply, keys[node.end], self._is_exact):
                continue
            if best is None or _rank(node) > _rank(best):
                best = node
            candidates += node.children
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
        """Why a node starts a context."""
        if matched is not None:
            return "template"
        request = node.request
        earlier = [other.request for other in self.nodes if other is not node]
        if any(other.root == request.root and other.keys == request.keys for other in earlier):
            return "repeat"
        roots = [other.root for other in earlier if other.keys[0] == request.keys[0]]
        if not roots:
            return "first"
        return "changed" if request.root in roots else "tools"

    def answer_turn(self) -> int | None:
        """The turn of the final answer: the newest delivered one of the first conversation, which is what has
        its tools and its first message. None if nothing was delivered there."""
        if not self.nodes:
            return None
        opening = _opening(self.nodes[0].request)
        turns = [node.turn for node in self.nodes if node.is_delivered and _opening(node.request) == opening]
        return max(turns, default=None)


def _rank(node: Node) -> tuple[int, bool, int]:
    return node.end, node.is_delivered, node.turn


def _opening(request: RequestKey) -> tuple[str, MessageKey]:
    return request.root, request.keys[0]
