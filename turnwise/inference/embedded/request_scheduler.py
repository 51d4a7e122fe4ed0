"""Decides which request runs when, and in which slot."""

import heapq
from collections import OrderedDict

from turnwise.errors import ServerError
from turnwise.inference.request import Request


class Scheduler:
    """Runs up to `max_concurrency` requests at once, in order of arrival. A conversation keeps its slot
    between requests. If all `max_slots` are owned, the least recently used idle conversation loses its slot;
    if none is idle, requests wait."""

    def __init__(self, *, max_slots: int, max_concurrency: int) -> None:
        self.running: dict[int, Request] = {}
        """The running requests, by slot."""
        self.waiting: dict[str, Request] = {}
        """The waiting requests, by conversation, in order of arrival."""
        self.slots: dict[str, int] = {}
        """The slot that each conversation owns."""
        self._max_concurrency = max_concurrency
        self._idle: OrderedDict[str, None] = OrderedDict()
        """Conversations that own a slot and don't run, the least recently used first."""
        self._free = list(range(max_slots))
        """A heap of the slots without an owner."""

    def add(self, request: Request) -> None:
        """Queues a request. Raises ServerError if another request of the conversation waits or runs."""
        if request.request_id in self.waiting or self.slots.get(request.request_id) in self.running:
            raise ServerError(
                f"conversation {request.request_id!r} already has a request in flight; a conversation takes "
                f"one at a time, "
                "so give each its own request_id"
            )
        self.waiting[request.request_id] = request
        if request.request_id in self._idle:
            self._idle.move_to_end(request.request_id)

    def admit(self) -> tuple[int, Request] | None:
        """Starts the next request. Returns its slot and the request; None if no request waits, or the next
        one has no room."""
        if not self.waiting or len(self.running) >= self._max_concurrency:
            return None
        request_id = next(iter(self.waiting))
        if request_id not in self.slots and not self._free:
            if not self._idle:
                return None
            self.release(next(iter(self._idle)))
        # The lowest free slot, so that running rows lie close together.
        slot = self.slots[request_id] if request_id in self.slots else heapq.heappop(self._free)
        return slot, self._start(request_id, slot)

    def admit_to(self, request_id: str, slot: int) -> tuple[int, Request]:
        """Starts the conversation's waiting request in this slot. An idle conversation that owns the slot
        loses it."""
        for owner in (request_id, *(other for other, owned in self.slots.items() if owned == slot)):
            self.release(owner)
        self._free.remove(slot)
        heapq.heapify(self._free)
        return slot, self._start(request_id, slot)

    def _start(self, request_id: str, slot: int) -> Request:
        self.slots[request_id] = slot
        self._idle.pop(request_id, None)
        request = self.running[slot] = self.waiting.pop(request_id)
        return request

    def finish(self, slot: int) -> Request:
        """Ends the request in `slot` and returns it. Its conversation keeps the slot."""
        request = self.running.pop(slot)
        self._idle[request.request_id] = None
        return request

    def release(self, request_id: str) -> None:
        """Frees the slot of an idle conversation. Does nothing if the conversation has no slot, or runs."""
        if request_id in self._idle:
            del self._idle[request_id]
            heapq.heappush(self._free, self.slots.pop(request_id))
