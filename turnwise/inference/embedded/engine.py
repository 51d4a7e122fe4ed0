"""The synchronous core of the embedded server: requests in, tokens out, one step at a time. A row is a
running request and its context. A step makes one forward pass over uncomputed tokens of the rows: the last
sampled token, the rest of a prompt, or a chunk of a long prompt. It samples a token for each row whose
context is then fully computed."""

from collections.abc import Sequence

import numpy as np
import torch

from turnwise.errors import ServerError
from turnwise.inference.embedded.prefill import Prefill
from turnwise.inference.embedded.request_scheduler import Scheduler
from turnwise.inference.embedded.runner import PackedStep, Runner
from turnwise.inference.embedded.sampler import Drawn, sample
from turnwise.inference.embedded.slot_arrays import Rows
from turnwise.inference.request import Decode, Finished, Request
from turnwise.runtime.schedule_log import Admissions
from turnwise.types import FinishReason, IntArray


def step_size(num_new: IntArray) -> dict[str, int]:
    """The numbers of rows, prompt tokens and sampled tokens in a step that computes `num_new` [B] tokens of
    its rows. A row with one token counts as decoding.

    >>> step_size(np.array([1, 1, 30]))
    {'batch_size': 3, 'prefill_tokens': 30, 'decode_tokens': 2}
    """
    num_decoded = int(np.count_nonzero(num_new == 1))
    return {
        "batch_size": len(num_new),
        "prefill_tokens": int(num_new.sum()) - num_decoded,
        "decode_tokens": num_decoded,
    }


class Engine:
    """Continuous batching over a runner. A forward pass computes up to `max_step_tokens` tokens: one per
    decoding row, the rest from prompts. A conversation's cache is kept for its next request. Cached keys and
    values depend on token ids and weights alone, so any conversation with the same prefix can copy them."""

    def __init__(
        self,
        runner: Runner,
        *,
        max_length: int,
        max_concurrency: int,
        max_step_tokens: int,
        decode: Decode | None = None,
    ) -> None:
        self.version = 0
        self.last_step = step_size(np.zeros(0, np.int64))
        """The `step_size` of the last step."""
        self.is_admitting = True
        self.is_frozen = False
        """Whether running requests are paused, so that weights may change meanwhile."""
        self.admissions: Admissions | None = None
        """The requests that the next step admits, and their slots; None = first come, first served."""
        self.admitted: Admissions = ()
        """The requests that the last step admitted, and their slots."""
        self.num_sampled = 0
        """Number of tokens sampled so far."""
        self._runner = runner
        self._max_length = max_length
        self._max_step_tokens = max_step_tokens
        self._decode = decode
        self._scheduler = Scheduler(max_slots=runner.max_slots, max_concurrency=max_concurrency)
        self._rows = Rows()
        self._prefill = Prefill(self._rows, runner)

    @property
    def num_running(self) -> int:
        return len(self._scheduler.running)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        if self.is_frozen:
            return False
        return self.num_running > 0 or (self.is_admitting and len(self._scheduler.waiting) > 0)

    def is_waiting(self, request_id: str) -> bool:
        """Whether the conversation has a request that isn't admitted yet."""
        return request_id in self._scheduler.waiting

    def add(self, request: Request) -> None:
        """Queues a request that `check_request` has passed. Raises ServerError if its conversation has
        another request."""
        self._scheduler.add(request)

    def step(self) -> list[Finished]:
        """Makes one forward pass and samples one token for every fully computed row. Returns the requests
        that ended, ordered by slot."""
        with torch.inference_mode():
            self._plan()
            state = self._rows.state
            slots = np.flatnonzero(state["is_running"] & (state["num_new"] > 0))
            rows = state[slots]
            self.last_step = step_size(rows["num_new"])
            if not len(slots):
                return []
            self._reserve(0, int(rows["length"].max()) + 1)
            step = PackedStep.pack(
                self._rows.ids,
                slots,
                rows["cached"],
                rows["num_new"],
                rows["length"],
            )
            logits = self._runner.forward(step)
            state["cached"][slots] += rows["num_new"]
            self._prefill.end_step()
            slots = slots[step.ends_context]
            drawn = sample(logits, rows[step.ends_context], self._rows.ids, slots)
        return self._advance(slots, drawn)

    def abort(self, request_id: str) -> Finished | None:
        """Ends the conversation's request with the tokens sampled so far; None if it has no request."""
        waiting = self._scheduler.waiting.pop(request_id, None)
        if waiting is not None:
            return Finished(waiting, "aborted", self.version)
        slot = self._scheduler.slots.get(request_id)
        if slot not in self._scheduler.running:
            return None
        return self._finish(slot, "aborted")

    def release(self, request_id: str) -> None:
        """Frees the slot of a conversation, unless its request runs."""
        self._scheduler.release(request_id)

    def abort_running(self) -> list[Finished]:
        """Ends the running requests with the tokens sampled so far."""
        return [self._finish(slot, "aborted") for slot in sorted(self._scheduler.running)]

    def fail_running(self) -> list[Request]:
        """Removes and returns the running requests. Their caches are dropped: a failed pass may have left
        them half written."""
        slots = sorted(self._scheduler.running)
        requests = [self._scheduler.finish(slot) for slot in slots]
        for slot, request in zip(slots, requests, strict=True):
            self._rows.state[slot] = 0  # nothing is cached, nothing runs
            self._prefill.forget(slot)
            self._scheduler.release(request.request_id)
        return requests

    def update(self, version: int) -> None:
        """Tells the engine that the weights are now those of `version`. Paused requests that are decoding
        keep their caches, but no other request will read those. All other caches are dropped. Raises
        ServerError if requests run unpaused."""
        if not self.is_frozen:
            self._require_idle()
        state = self._rows.state
        cached_slots = [slot for slot in self._scheduler.running if slot not in self._prefill.slots]
        for slot in cached_slots:
            request = self._scheduler.running[slot]
            num_sampled = int(state["length"][slot]) - len(request.context_ids)
            request.versions = request.versions_with(self.version, num_sampled)
        with torch.inference_mode():
            for slot in self._scheduler.running.keys() - cached_slots:
                self._runner.usable_prefix(slot, int(state["cached"][slot]), 0)
        self._drop_prefixes(cached_slots)
        self._runner.refresh(cached_slots)
        self.version = version

    def free_cache(self) -> None:
        """Frees the cache's memory. Raises ServerError if a request is running."""
        self._require_idle()
        self._drop_prefixes()
        self._runner.free()

    def _require_idle(self) -> None:
        if self.num_running:
            raise ServerError(
                f"{self.num_running} requests are running; suspend the server before touching its cache or "
                "weights"
            )

    def _drop_prefixes(self, cached_slots: Sequence[int] = ()) -> None:
        cached = self._rows.state["cached"]
        cached *= np.isin(np.arange(len(cached)), cached_slots)
        self._prefill.forget_all()

    def _plan(self) -> None:
        """Plans the next forward pass: decoding rows, then prompts in order of arrival. Admits requests while
        room is left."""
        self.admitted = ()
        num_decoding = self.num_running - len(self._prefill.slots)
        budget = self._prefill.plan(max(self._max_step_tokens - num_decoding, 1))
        while budget and self.is_admitting:
            admitted = self._admit()
            if admitted is None:
                break
            slot, request = admitted
            self.admitted += ((request.request_id, slot),)
            self._reserve(slot + 1, len(request.context_ids))
            self._prefill.start(slot, request, self._max_length)
            budget -= self._prefill.plan_row(slot, budget)

    def _admit(self) -> tuple[int, Request] | None:
        """Starts the next request. Returns its slot and the request; None if no more can start in this
        step."""
        if self.admissions is None:
            return self._scheduler.admit()
        if len(self.admitted) >= len(self.admissions):
            return None
        request_id, slot = self.admissions[len(self.admitted)]
        return self._scheduler.admit_to(request_id, slot)

    def _reserve(self, num_slots: int, capacity: int) -> None:
        self._rows.reserve(num_slots, capacity)
        self._runner.reserve(num_slots, capacity)

    def _advance(self, slots: IntArray, drawn: Drawn) -> list[Finished]:
        rows = self._rows
        state = rows.state
        token_ids = drawn.token_ids
        self.num_sampled += len(slots)
        lengths = state["length"][slots]
        rows.ids[slots, lengths] = token_ids
        rows.logprobs[slots, lengths] = drawn.logprobs
        for row, ids in drawn.kept_ids.items():
            self._scheduler.running[int(slots[row])].kept_ids.append(ids)
        state["length"][slots] = lengths + 1
        is_stopped = (rows.stop_ids[slots] == token_ids[:, None]).any(1)
        for row in np.flatnonzero(state["has_stop_strings"][slots] & ~is_stopped):
            slot = int(slots[row])
            response_ids, _ = rows.response(slot)
            is_stopped[row] = self._scheduler.running[slot].hits_stop_string(response_ids, self._decode)
        is_over = is_stopped | (lengths + 1 >= state["limit"][slots])
        finished = []
        for row in np.flatnonzero(is_over):
            reason: FinishReason = "stop" if is_stopped[row] else "length"
            finished.append(self._finish(int(slots[row]), reason))
        return finished

    def _finish(self, slot: int, reason: FinishReason) -> Finished:
        request = self._scheduler.finish(slot)
        token_ids, logprobs = self._rows.response(slot)
        num_partial = len(request.partial_ids)
        request.token_ids = token_ids[num_partial:]
        request.logprobs = logprobs[num_partial:]
        self._rows.state["is_running"][slot] = False
        if request.versions:  # older weights computed some of the cached keys and values
            self._rows.state["cached"][slot] = 0
        self._prefill.slots.pop(slot, None)
        return Finished(request, reason, self.version)
