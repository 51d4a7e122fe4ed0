"""Several replicas behind the interface of one server."""

import asyncio
import itertools
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, TypeVar

from turnwise.errors import (
    DeadlineError,
    LostWeightsError,
    ReplicasDeadError,
    ServerError,
    TurnwiseError,
    counted,
)
from turnwise.inference.request import join
from turnwise.inference.restarts import Restarts
from turnwise.protocols import InferenceServer, MemoryKind, OnWeightUpdate, Suspension, WeightSource
from turnwise.runtime.info import ServerInfo
from turnwise.runtime.watchdog import Watchdog
from turnwise.transfer.contracts import SendAgain
from turnwise.transfer.manifest import WeightManifest
from turnwise.transfer.together import receive
from turnwise.types import Completion, Media, SamplingParams

logger = logging.getLogger(__name__)
T = TypeVar("T")
UseDevices = Callable[[InferenceServer], AbstractContextManager[Any]]

_UPDATE = "a weight update"  # asks, in messages
_RECEIVE = "receive the weights"
_SETTING = "deadlines.request_s"
_MAX_CONVERSATIONS = 100_000
_MAX_IMBALANCE = 1.1
"""A conversation leaves its replica if the replica's load exceeds this many times the least load, plus the
request's tokens."""


class LLMServerManager:
    """Routes requests over replicas. A new conversation goes to the least loaded replica and stays there,
    where its cache is. If this replica has clearly more to do than the least loaded one, the conversation
    moves to the latter, and its context is computed again. Without moves, loads wouldn't even out: response
    lengths differ (`benchmarks/balance.py`).

    A replica's load is the sum of prompt length and `max_new_tokens` over its unfinished requests. A replica
    that raises any error but a TurnwiseError is dead: its requests are retried elsewhere with the same prompt
    and seed. With `restarts` it is started again, and so is a replica that takes longer than `request_s`
    seconds for a call. Without, the latter raises DeadlineError, and the replica gets no more calls. The
    replicas of the last `_MAX_CONVERSATIONS` conversations are remembered.
    Raises ServerError if `servers` is empty."""

    def __init__(
        self,
        servers: Sequence[InferenceServer],
        *,
        request_s: float | None = None,
        watchdog: Watchdog | None = None,
    ) -> None:
        if not servers:
            raise ServerError("an LLMServerManager needs at least one server, got none")
        self._servers = dict(enumerate(servers))
        self._request_s = request_s
        self._watchdog = watchdog or Watchdog()
        self._replica_of: OrderedDict[str, int] = OrderedDict()
        self._tokens_in_flight = dict.fromkeys(self._servers, 0)
        self._last_error: Exception | None = None
        self.claim_devices: Callable[[], Awaitable[None]] | None = None
        """Awaited before each request, if roles share devices."""
        self.use_devices: UseDevices = nullcontext
        """Around each request to a replica: measures how long its devices are used."""
        self.restarts: Restarts | None = None
        """Starts dead replicas again."""
        self._info: ServerInfo | None = None
        self._lent: dict[InferenceServer, int] = {}
        """Replicas that are lent → their numbers."""
        self._in_flight: set[str] = set()  # conversations with a request that its caller hasn't aborted
        self._interruption: OnWeightUpdate = "finish"
        """What happens to the requests that the last weight update interrupted."""

    @property
    def servers(self) -> tuple[InferenceServer, ...]:
        """The replicas that are alive."""
        return tuple(self._servers.values())

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        request_id: str,
        media: Sequence[Media] = (),
    ) -> Completion:
        """See `PolicyServer.generate`. A response that a weight update interrupts continues or starts over;
        see `suspend`. Raises ServerError if the request can't be served; ReplicasDeadError if no replica is
        left."""
        if self.claim_devices is not None:
            await self.claim_devices()
        pieces: list[Completion] = []
        partial_ids: list[int] = []
        self._in_flight.add(request_id)
        try:
            while True:
                piece = await self._piece(prompt_ids, sampling, request_id, media, partial_ids)
                pieces.append(piece)
                is_interrupted = piece.finish_reason == "aborted" and request_id in self._in_flight
                if not is_interrupted or self._interruption == "finish":
                    return join(pieces)
                if self._interruption == "abort_restart":
                    pieces.clear()
                    partial_ids = []
                else:
                    partial_ids = join(pieces).token_ids.tolist()
        finally:
            self._in_flight.discard(request_id)

    async def _piece(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        request_id: str,
        media: Sequence[Media],
        partial_ids: Sequence[int],
    ) -> Completion:
        """The tokens that a replica samples until the response ends or is interrupted. A dead replica's
        tokens are lost."""
        # A server that nothing interrupts needs no such argument.
        partial = {"partial_ids": partial_ids} if partial_ids else {}
        num_tokens = len(prompt_ids) + sampling.max_new_tokens

        async def generate(server: InferenceServer) -> Completion:
            with self.use_devices(server):
                return await server.generate(prompt_ids, sampling, request_id, media, **partial)

        while True:
            if not self._servers and self.restarts is not None:
                await self.restarts.next_end()
                if self._servers or self.restarts.is_busy:
                    continue
            last_replica = self._replica_of.get(request_id)
            replica = self._route(request_id, num_tokens)
            if last_replica != replica:
                await self._release(last_replica, request_id)
            self._tokens_in_flight[replica] += num_tokens
            try:
                completion = await self._ask(
                    replica,
                    _conversation(request_id),
                    "answer",
                    generate,
                )
            finally:
                self._tokens_in_flight[replica] -= num_tokens
            if completion is not None:
                return completion

    async def abort(self, request_id: str) -> None:
        self._in_flight.discard(request_id)
        replica = self._replica_of.get(request_id)
        conversation = _conversation(request_id)
        await self._ask(
            replica,
            conversation,
            "abort its request",
            lambda server: server.abort(request_id),
        )

    async def release(self, request_id: str) -> None:
        self._in_flight.discard(request_id)
        await self._release(self._replica_of.pop(request_id, None), request_id)

    async def _release(self, replica: int | None, request_id: str) -> None:
        conversation = _conversation(request_id)
        await self._ask(
            replica,
            conversation,
            "release its cache",
            lambda server: server.release(request_id),
        )

    async def suspend(self, on_weight_update: OnWeightUpdate = "finish") -> None:
        """Suspends all replicas. Running requests end first (`finish`), pause (`keep`), or are interrupted.
        With the new weights, interrupted requests continue from their tokens (`abort_continue`) or start over
        (`abort_restart`)."""
        suspensions: dict[OnWeightUpdate, Suspension] = {"finish": "finish", "keep": "keep"}
        suspension = suspensions.get(on_weight_update, "abort")
        if suspension == "abort":
            self._interruption = on_weight_update
        await self._ask_all(_UPDATE, "end its requests", lambda server: server.suspend(suspension))

    async def begin_update(self, manifest: WeightManifest) -> None:
        """Prepares all replicas for weights. Raises ModelError if the weights don't fit the model of one of
        them."""
        await self._ask_all(_UPDATE, "check the weights", lambda server: server.begin_update(manifest))

    async def receive(self, weights: WeightSource, send_again: SendAgain | None = None) -> int:
        """Sends weights to all replicas; each reads them once. Those that have lost them, since the process
        that had them has ended, get what `send_again` returns. Returns the number of bytes written in all."""
        lost: dict[InferenceServer, LostWeightsError] = {}

        async def receive_or_lose(server: InferenceServer) -> int:
            try:
                return await receive(server, weights)
            except LostWeightsError as error:
                lost[server] = error
                return 0

        written = await self._ask_all(_UPDATE, _RECEIVE, receive_or_lose)
        is_lost = True
        for server, error in lost.items():
            written.append(await self._receive_again(server, error, send_again, is_lost))
            is_lost = False
        return sum(num_bytes or 0 for num_bytes in written)

    async def _receive_again(
        self,
        server: InferenceServer,
        error: LostWeightsError,
        send_again: SendAgain | None,
        is_lost: bool,
    ) -> int | None:
        """Sends weights to a replica that has lost them. One that loses them once more is dead."""
        try:
            if send_again is None:
                raise error
            weights = await send_again(server, is_lost=is_lost)
            replica = next((number for number, other in self._servers.items() if other is server), None)
            logger.warning("inference replica %s gets the weights once more: %s", replica, error)
            return await self._ask(replica, _UPDATE, _RECEIVE, lambda server: receive(server, weights))
        except LostWeightsError as again:
            self.bury(server, again)
            return None

    async def resume(self, version: int) -> None:
        await self._ask_all(_UPDATE, "admit requests again", lambda server: server.resume(version))

    async def sleep(self, kinds: Iterable[MemoryKind]) -> None:
        freed = list(kinds)
        await self._ask_all("the pipeline", "free memory", lambda server: server.sleep(freed))

    async def wake(self, kinds: Iterable[MemoryKind]) -> None:
        back = list(kinds)
        await self._ask_all("the pipeline", "take its memory back", lambda server: server.wake(back))

    async def close(self) -> None:
        if self.restarts is not None:
            await self.restarts.close()
        for server in self._lent:
            with suppress(Exception):  # boundary: nobody needs a replica that can't even close
                await server.close()
        await self._ask_all("the end of the run", "close", lambda server: server.close())

    def info(self) -> ServerInfo:
        """The info of a live replica; all are built alike."""
        if self._servers:
            self._info = self.servers[0].info()
        elif self._info is None or self.restarts is None or not self.restarts.is_busy:
            raise self._all_dead()
        return self._info

    async def _ask_all(
        self,
        who: str,
        task: str,
        ask: Callable[[InferenceServer], Awaitable[T]],
    ) -> list[T | None]:
        answers = [self._ask(replica, who, task, ask) for replica in self._servers]
        return await asyncio.gather(*answers)

    async def _ask(
        self,
        replica: int | None,
        who: str,
        task: str,
        ask: Callable[[InferenceServer], Awaitable[T]],
    ) -> T | None:
        """The replica's answer; None if the replica is dead or dies now. `who` and `task` are for a
        DeadlineError's message."""
        if replica is None or replica not in self._servers:
            return None
        server = self._servers[replica]
        awaited = f"inference replica {replica} to {task}"
        try:
            async with self._watchdog.waiting(who, awaited, self._request_s, _SETTING):
                return await ask(server)
        except DeadlineError as error:
            if self.restarts is not None:
                self.bury(server, error)
                return None
            self._last_error = error
            # The replica gets no more calls: otherwise the end of the run would wait for it once per
            # conversation.
            self._servers.pop(replica, None)
            raise
        except TurnwiseError:
            raise
        except Exception as error:  # boundary: any other exception means that the replica is broken
            self.bury(server, error)
            return None

    def join(self, server: InferenceServer) -> None:
        """Adds a replica, which must have the weights of the others. Call it between weight updates. One that
        was lent or is started again keeps its number, by which its deaths count; a new one gets the lowest
        that is free."""
        index = self._lent.pop(server, None)
        taken = {*self._servers, *self._lent.values()}
        if self.restarts is not None:
            index = self.restarts.joined(server) if index is None else index
            taken.update(self.restarts.numbers)
        if index is None:
            index = next(number for number in itertools.count() if number not in taken)
        self._servers = dict(sorted([*self._servers.items(), (index, server)]))
        # Requests that its predecessor has lost may still be on their way elsewhere.
        self._tokens_in_flight.setdefault(index, 0)

    def bury(self, server: InferenceServer, error: Exception) -> None:
        """Takes out a replica that has been found dead, and has it started again if it may be. Does nothing
        if that has been done: each of its requests says so, and another may have its number by now."""
        replicas = [replica for replica, candidate in self._servers.items() if candidate is server]
        if not replicas:
            return
        [replica] = replicas
        self._last_error = error
        del self._servers[replica]
        is_restarted = self.restarts is not None and self.restarts.begin(server, replica)
        remaining = f"{counted(len(self._servers), 'replica')} left" if self._servers else "none is left"
        fate = "is started again" if is_restarted else "isn't started again"
        logger.error(
            "Inference replica %d is dead (%r) and %s: %s for its requests.", replica, error, fate, remaining
        )

    async def leave(self, server: InferenceServer) -> None:
        """Removes a replica, and waits until it has finished its requests. Its conversations continue
        elsewhere."""
        self._servers = self._without(server)
        await server.suspend()

    async def lend(self, server: InferenceServer, on_weight_update: OnWeightUpdate = "finish") -> None:
        """Takes out a replica whose devices are needed, until it joins again. Its requests end first, or move
        to the other replicas with `abort_continue` (from their tokens) and `abort_restart`."""
        self._lent |= {lent: index for index, lent in self._servers.items() if lent is server}
        if on_weight_update in ("abort_continue", "abort_restart"):
            self._interruption = on_weight_update
            self._servers = self._without(server)
            await server.suspend("abort")
        else:
            await self.leave(server)

    async def take_back(
        self, server: InferenceServer, restore: Callable[[InferenceServer], Awaitable[None]]
    ) -> None:
        """Has `restore` prepare a replica that was lent and let it `join`. If that fails, the replica is
        dead."""
        try:
            await restore(server)
        except Exception as error:  # boundary: whatever a replica raises, it is broken
            self.join(server)
            self.bury(server, error)

    def _without(self, server: InferenceServer) -> dict[int, InferenceServer]:
        return {index: replica for index, replica in self._servers.items() if replica is not server}

    def _route(self, request_id: str, num_tokens: int) -> int:
        if not self._servers:
            raise self._all_dead() from self._last_error
        replica = self._replica_of.get(request_id)
        load = self._tokens_in_flight
        least_loaded = min(self._servers, key=load.__getitem__)
        max_load = _MAX_IMBALANCE * load[least_loaded] + num_tokens
        if replica not in self._servers or load[replica] > max_load:
            replica = least_loaded
            self._replica_of[request_id] = replica
        self._replica_of.move_to_end(request_id)
        if len(self._replica_of) > _MAX_CONVERSATIONS:
            self._replica_of.popitem(last=False)
        return replica

    def _all_dead(self) -> ReplicasDeadError:
        return ReplicasDeadError(
            f"every inference replica is dead; the last one failed with {self._last_error!r}"
        )


def _conversation(request_id: str) -> str:
    return f"conversation {request_id!r}"


AsyncLLMServerManager = LLMServerManager
AsyncServer = InferenceServer
