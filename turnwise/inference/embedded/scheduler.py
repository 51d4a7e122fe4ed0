"""Decides which request runs when, and in which slot."""

import heapq
from collections import OrderedDict

from turnwise.errors import ServerError
from turnwise.inference.request import Request


class Scheduler:
    """Serves requests in order of arrival, in at most `max_slots` slots. A slot belongs to a conversation, also between
    requests. If no slot is free, the least recently used idle conversation loses its slot; if all run, requests wait."""

    def __init__(self, *, max_slots: int, max_concurrency: int) -> None:
        self.max_slots = max_slots
        self.max_concurrency = max_concurrency
        self.running: dict[int, Request] = {}
        """Slot → request."""
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        self._slots: dict[str, int] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()
        """Conversations that own a slot and don't run, the least recently used first."""
        self._free: list[int] = []
        self._num_fresh = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def is_waiting(self, request_id: str) -> bool:
        return request_id in self._waiting

    def slot_of(self, request_id: str) -> int | None:
        return self._slots.get(request_id)

    def is_active(self, request_id: str) -> bool:
        """Whether the conversation has a request that waits or runs."""
        return request_id in self._waiting or (request_id in self._slots and request_id not in self._idle)

    def add(self, request: Request) -> None:
        """Queues a request. Raises ServerError if the conversation already has one."""
        if self.is_active(request.request_id):
            raise ServerError(
                f"conversation {request.request_id!r} already has a request in flight; a conversation takes one at a time, "
                "so give each its own request_id"
            )
        self._waiting[request.request_id] = request
        if request.request_id in self._idle:
            self._idle.move_to_end(request.request_id)

    def admit(self) -> tuple[int, Request] | None:
        """The next request to start, and its slot. None if no request waits, or there is no room for one."""
        if not self._waiting or len(self.running) >= self.max_concurrency:
            return None
        request_id = next(iter(self._waiting))
        slot = self._slots[request_id] if request_id in self._slots else self._take_slot()
        if slot is None:
            return None
        self._slots[request_id] = slot
        self._idle.pop(request_id, None)
        request = self.running[slot] = self._waiting.pop(request_id)
        return slot, request

    def admit_to(self, request_id: str, slot: int) -> tuple[int, Request]:
        """Starts the conversation's waiting request in this slot. An idle conversation that owns the slot loses it."""
        own = self._slots.pop(request_id, None)
        if own is not None:
            heapq.heappush(self._free, own)
        self._idle.pop(request_id, None)
        owner = next((other for other, theirs in self._slots.items() if theirs == slot), None)
        if owner is not None:
            self.release(owner)
        for fresh in range(self._num_fresh, slot + 1):
            heapq.heappush(self._free, fresh)
        self._num_fresh = max(self._num_fresh, slot + 1)
        self._free.remove(slot)
        heapq.heapify(self._free)
        self._slots[request_id] = slot
        request = self.running[slot] = self._waiting.pop(request_id)
        return slot, request

    def finish(self, slot: int) -> Request:
        """Ends the request in `slot` and returns it. Its conversation keeps the slot."""
        request = self.running.pop(slot)
        self._idle[request.request_id] = None
        return request

    def withdraw(self, request_id: str) -> Request | None:
        """Takes a waiting request out of the queue."""
        return self._waiting.pop(request_id, None)

    def release(self, request_id: str) -> int | None:
        """Frees the slot of an idle conversation and returns it; None if the conversation has no slot or runs."""
        if request_id not in self._idle:
            return None
        del self._idle[request_id]
        slot = self._slots.pop(request_id)
        heapq.heappush(self._free, slot)
        return slot

    def _take_slot(self) -> int | None:
        """The lowest free slot, so that running rows lie close together; else the least recently used idle one; else None."""
        if not self._free and self._num_fresh < self.max_slots:
            self._num_fresh += 1
            return self._num_fresh - 1
        if not self._free and self._idle:
            self.release(next(iter(self._idle)))
        return heapq.heappop(self._free) if self._free else None
