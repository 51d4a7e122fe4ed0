"""What conversations call: several replicas behind the signature of one."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager

from turnwise.errors import DeadlineError, ReplicasDeadError, ServerError, TurnwiseError
from turnwise.protocols import InferenceServer, MemoryKind, OnWeightUpdate
from turnwise.types import Completion, Media, SamplingParams

logger = logging.getLogger(__name__)


class LLMServerManager:
    """Routes requests over replicas: a conversation stays where its cache is, a new one goes where the least is in flight.

    Load is counted in tokens, prompt and budget, of requests that are really running or waiting. A replica that breaks is
    dead: its requests are retried elsewhere with the same prompt and seed. `request_s` bounds every wait for a replica, in
    seconds; `max_conversations` bounds the memory of who is where.

    Raises:
        ServerError: no server is given.
    """

    def __init__(
        self, servers: Sequence[InferenceServer], *, request_s: float | None = None, max_conversations: int = 100_000
    ) -> None:
        if not servers:
            raise ServerError("an LLMServerManager needs at least one server, got none")
        self._servers = dict(enumerate(servers))
        self._request_s = request_s
        self._max_conversations = max_conversations
        self._replica_of: OrderedDict[str, int] = OrderedDict()
        self._tokens_in_flight = dict.fromkeys(self._servers, 0)
        self._last_error: Exception | None = None

    @property
    def servers(self) -> tuple[InferenceServer, ...]:
        """The replicas that are alive."""
        return tuple(self._servers.values())

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, request_id: str, media: Sequence[Media] = ()
    ) -> Completion:
        """See `InferenceServer.generate`.

        Raises:
            ServerError: the request can't be served.
            ReplicasDeadError: no replica is left.
            DeadlineError: it took longer than `request_s`.
        """
        num_tokens = len(prompt_ids) + sampling.max_new_tokens
        while True:
            replica = self._route(request_id)
            self._tokens_in_flight[replica] += num_tokens
            try:
                async with self._deadline(f"conversation {request_id!r}", replica, "a response"):
                    return await self._servers[replica].generate(prompt_ids, sampling, request_id, media)
            except TurnwiseError:
                raise
            except Exception as error:  # boundary: whatever else a replica raises means that it is broken
                self._bury(replica, error)
            finally:
                self._tokens_in_flight[replica] -= num_tokens

    async def abort(self, request_id: str) -> None:
        server = self._server_of(request_id)
        if server is not None:
            await server.abort(request_id)

    async def release(self, request_id: str) -> None:
        server = self._server_of(request_id)
        self._replica_of.pop(request_id, None)
        if server is not None:
            await server.release(request_id)

    async def suspend(self, on_weight_update: OnWeightUpdate = "finish") -> None:
        """Suspends all replicas.

        Raises:
            DeadlineError: one took longer than `request_s`.
        """

        async def suspend_one(replica: int, server: InferenceServer) -> None:
            async with self._deadline("a weight update", replica, "its running requests to end"):
                await server.suspend(on_weight_update)

        await asyncio.gather(*(suspend_one(replica, server) for replica, server in self._servers.items()))

    async def resume(self, version: int) -> None:
        await asyncio.gather(*(server.resume(version) for server in self._servers.values()))

    async def sleep(self, kinds: Iterable[MemoryKind]) -> None:
        await asyncio.gather(*(server.sleep(kinds) for server in self._servers.values()))

    async def wake(self, kinds: Iterable[MemoryKind]) -> None:
        await asyncio.gather(*(server.wake(kinds) for server in self._servers.values()))

    async def close(self) -> None:
        await asyncio.gather(*(server.close() for server in self._servers.values()))

    def _server_of(self, request_id: str) -> InferenceServer | None:
        replica = self._replica_of.get(request_id)
        return None if replica is None else self._servers.get(replica)

    def _route(self, request_id: str) -> int:
        if not self._servers:
            raise ReplicasDeadError(
                f"every inference replica is dead; the last one failed with {self._last_error!r}"
            ) from self._last_error
        replica = self._replica_of.get(request_id)
        if replica not in self._servers:
            replica = min(self._servers, key=lambda index: (self._tokens_in_flight[index], index))
            self._replica_of[request_id] = replica
        self._replica_of.move_to_end(request_id)
        if len(self._replica_of) > self._max_conversations:
            self._replica_of.popitem(last=False)
        return replica

    def _bury(self, replica: int, error: Exception) -> None:
        self._last_error = error
        if self._servers.pop(replica, None) is not None:
            logger.error(
                "Inference replica %d is dead (%r); its requests go to the %d others.", replica, error, len(self._servers)
            )

    @asynccontextmanager
    async def _deadline(self, who: str, replica: int, what: str) -> AsyncIterator[None]:
        timeout = asyncio.timeout(self._request_s)
        try:
            async with timeout:
                yield
        except TimeoutError as error:
            if not timeout.expired():
                raise
            raise DeadlineError(
                f"{who} waited {self._request_s:g} s for {what} from inference replica {replica}; "
                "raise deadlines.request_s or lower max_new_tokens"
            ) from error


AsyncLLMServerManager = LLMServerManager
AsyncServer = InferenceServer
