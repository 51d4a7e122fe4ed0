"""An inference server in its own process, with the interface of a server in this process."""

import asyncio
import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from turnwise.cluster.messages import Command, Reply, SetUp, dumps, loads
from turnwise.cluster.process import ForkedProcess, Started
from turnwise.cluster.server_child import ServerCall
from turnwise.errors import ServerError
from turnwise.protocols import MemoryKind, Suspension, WeightSource
from turnwise.runtime.rank import RankContext
from turnwise.runtime_info import ServerInfo
from turnwise.transfer.manifest import WeightManifest
from turnwise.types import Completion, Media, SamplingParams


class ServerProcess(ForkedProcess):
    """A `protocols.InferenceServer` in another process, where its calls run concurrently. `begin` makes the server. If the
    process ends, all callers that wait for it get a ConnectionError."""

    _entry = "turnwise.cluster.server_child:serve"

    def __init__(self, *talk: Any) -> None:
        super().__init__(*talk)
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._info: ServerInfo | None = None
        self._beginning: list[Started] = []

    def begin(self, set_up: SetUp, factory: Callable[[RankContext], Any], rank: RankContext) -> None:
        """Begins to set up the process and to make the server in it."""
        self._beginning = [
            self.start(f"setting up {self.name}", Command("set_up", (set_up,))),
            self.start(f"making {self.name}", Command("make", (factory, rank))),
        ]

    def wait_until_ready(self) -> None:
        """Waits until the server is made. Raises DeadlineError, WorkerError if the process has ended, or the server's error."""
        for step in self._beginning:
            step.result()
        self._thread.start(self._read_replies)
        self._info = self._run_async(self._call("info"))

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        request_id: str,
        media: Sequence[Media] = (),
        partial_ids: Sequence[int] = (),
    ) -> Completion:
        completion: Completion = await self._call("generate", prompt_ids, sampling, request_id, media, partial_ids)
        return completion

    async def abort(self, request_id: str) -> None:
        await self._call("abort", request_id)

    async def release(self, request_id: str) -> None:
        await self._call("release", request_id)

    async def suspend(self, how: Suspension = "finish") -> None:
        await self._call("suspend", how)

    async def begin_update(self, manifest: WeightManifest) -> None:
        await self._call("begin_update", manifest)

    async def receive(self, weights: WeightSource) -> int:
        """See `InferenceServer`. `weights` must have a form that can be sent, such as `SharedWeights`."""
        num_bytes: int = await self._call("receive", weights)
        return num_bytes

    async def resume(self, version: int) -> None:
        await self._call("resume", version)

    async def sleep(self, kinds: Iterable[MemoryKind]) -> None:
        await self._call("sleep", list(kinds))

    async def wake(self, kinds: Iterable[MemoryKind]) -> None:
        await self._call("wake", list(kinds))

    async def close(self) -> None:
        """Ends the process. Running requests fail with a ServerError."""
        for number in list(self._waiting):
            self._resolve(number, Reply(error=ServerError(f"{self.name} was closed in the middle of a call")))
        await asyncio.to_thread(self.end)

    def info(self) -> ServerInfo:
        assert self._info is not None, "known since `wait_until_ready`"
        return self._info

    async def _call(self, method: str, *args: Any) -> Any:
        if self._has_ended:
            raise ServerError(f"{self.name} is closed")
        if self.is_gone:
            raise ConnectionError(f"{self.name} has ended: {self._fate()}")
        number, loop = next(self._numbers), asyncio.get_running_loop()
        self._waiting[number] = answered = loop.create_future()
        try:
            self._send(ServerCall(number, method, args))
            return await answered
        except asyncio.CancelledError:
            self.left()
            with suppress(ConnectionError):  # a process that has ended needs no cancelling
                self._send(ServerCall(number))
            raise
        finally:
            self._waiting.pop(number, None)

    def _send(self, call: ServerCall) -> None:
        try:
            self._connection.send_bytes(dumps(call))
        except OSError as error:
            raise ConnectionError(f"{self.name} has ended: {self._fate()}") from error

    def _read_replies(self) -> None:
        """Runs in the thread: passes replies to the event loops that wait for them."""
        try:
            while True:
                self._resolve(*loads(self._received()))
        except (EOFError, OSError, TypeError):  # TypeError: `end` closed the connection in the middle of a read
            self.is_gone = True
            for number in list(self._waiting):
                self._resolve(number, Reply(error=ConnectionError(f"{self.name} has ended: {self._fate()}")))

    def _note(self, reply: Reply) -> None:
        """See `ConnectedProcess`. A replica's spans get their own track, since spans of one track mustn't overlap."""
        reply.spans = [(f"{self.name}: {track}", *rest) for track, *rest in reply.spans]  # type: ignore[misc]
        super()._note(reply)

    def _resolve(self, number: int, reply: Reply) -> None:
        """Passes a reply to call `number`, on the caller's event loop. Does nothing if nobody waits for the call any more."""
        answered = self._waiting.get(number)
        if answered is None:
            return

        def resolve() -> None:
            self._note(reply)
            if answered.done():
                return
            if reply.error is None:
                answered.set_result(reply.value)
            else:
                answered.set_exception(reply.error)

        with suppress(RuntimeError):  # the run's event loop is closed
            answered.get_loop().call_soon_threadsafe(resolve)
