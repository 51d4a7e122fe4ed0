"""An inference server in its own process, with the interface of a server in this process."""

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from typing import Any

from turnwise.cluster.messages import Command, Parcel, Reply, SetUp, joined, pack, parted, unpack
from turnwise.cluster.process import WorkerProcess, add_stacks
from turnwise.cluster.rank_process import RunAsync
from turnwise.cluster.server_child import ServerCall
from turnwise.cluster.wire import Message
from turnwise.errors import ServerError, TurnwiseError
from turnwise.protocols import MemoryKind, Suspension, WeightSource
from turnwise.runtime.info import ServerInfo
from turnwise.runtime.rank import RankContext
from turnwise.runtime.threads import DaemonThread
from turnwise.runtime.torch_group import Meeting
from turnwise.runtime.watchdog import Watchdog
from turnwise.transfer.manifest import WeightManifest
from turnwise.transfer.shared_memory import SharedWeights
from turnwise.types import Completion, Media, SamplingParams

logger = logging.getLogger(__name__)

SERVERS = "turnwise.cluster.server_child"
"""The module that a server's process runs, see `hosts`."""


class ServerProcess:
    """A `protocols.InferenceServer` in another process, which runs `SERVERS`. Calls run concurrently there;
    those of one tick of the event loop are sent together. `begin` makes the server. If the process ends, all
    callers that wait for it get a ConnectionError. `start_process` starts a process in its place."""

    def __init__(
        self,
        process: WorkerProcess,
        run_async: RunAsync,
        watchdog: Watchdog,
        start_process: Callable[[], WorkerProcess] | None = None,
    ) -> None:
        self.name = process.name
        self.process = process
        self.node = ""
        """The node that it runs on, as `RankContext.node`."""
        self.replica = 0
        """Its number among the servers, as `RankContext.rank`."""
        self._start_process = start_process
        self._run_async = run_async
        self._watchdog = watchdog
        self._thread = DaemonThread(self.name)
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._due: list[tuple[int, Message]] = []
        """Number and message of each call of this tick."""
        self._info: ServerInfo | None = None
        self._setting_up: Future[None] | None = None
        self._has_ended = False

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended by itself."""
        return self.process.life.is_gone

    def begin(self, set_up: SetUp, factory: Callable[[RankContext], Any], rank: RankContext) -> None:
        """Begins to set up the process and to make the server in it."""
        self.node = rank.node
        self.replica = rank.rank
        self._made_by = (set_up, factory, rank)
        self._setting_up = self._thread.start(self._set_up, set_up, factory, rank)

    def _set_up(self, set_up: SetUp, factory: Callable[[RankContext], Any], rank: RankContext) -> None:
        self.process.ask(f"setting up {self.name}", Parcel(Command("set_up", (set_up,))))
        try:
            self.process.ask(f"making {self.name}", Parcel(Command("make", (factory, rank))))
        except TurnwiseError:
            # An engine says why on its standard error, which under Ray is a file of its node.
            life = self.process.life
            output = "" if life.is_gone else life.hidden_output()
            if output:
                logger.warning("%s wrote before it failed:\n%s", self.name, output)
            raise

    def wait_until_ready(self) -> None:
        """Waits until the server is made. Raises DeadlineError, WorkerError if the process has ended, or the
        server's error."""
        self._run_async(self.ready())

    async def ready(self) -> None:
        """See `wait_until_ready`."""
        assert self._setting_up is not None, "`begin` comes first"
        try:
            await asyncio.wrap_future(self._setting_up)
        except asyncio.CancelledError:
            self._abandon()
            raise
        self._thread.start(self._read_replies)
        self._info = await self._call("info")

    async def started_again(self, deadline_s: float | None) -> "ServerProcess":
        """Ends this process, and starts another with the same server. Raises DeadlineError if that takes
        longer than `deadline_s` seconds."""
        if self._start_process is None:
            raise ServerError(f"nothing starts another process in the place of {self.name}")
        await asyncio.to_thread(self.end)
        awaited = f"{self.name} to start again"
        with ExitStack() as on_error:
            async with self._watchdog.waiting("the run", awaited, deadline_s, "deadlines.start_s"):
                new = await _started(self._start_process)
                process = ServerProcess(new, self._run_async, self._watchdog, self._start_process)
                on_error.callback(process.end)
                process.begin(*self._made_by)
                await process.ready()
            on_error.pop_all()
        return process

    def end(self) -> None:
        """Ends the process, even in the middle of a call. Calling it again is harmless."""
        if not self._has_ended:
            self._has_ended = True
            self.process.end(self._thread)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        request_id: str,
        media: Sequence[Media] = (),
        partial_ids: Sequence[int] = (),
    ) -> Completion:
        completion: Completion = await self._call(
            "generate", prompt_ids, sampling, request_id, media, partial_ids
        )
        return completion

    async def abort(self, request_id: str) -> None:
        await self._call("abort", request_id)

    async def release(self, request_id: str) -> None:
        await self._call("release", request_id)

    async def suspend(self, suspension: Suspension = "finish") -> None:
        await self._call("suspend", suspension)

    async def begin_update(self, manifest: WeightManifest) -> None:
        await self._call("begin_update", manifest)

    async def receive(self, weights: WeightSource) -> int:
        """See `InferenceServer`. `weights` must have a form that can be sent, such as `SharedWeights`."""
        num_bytes: int = await self._call("receive", weights.on(self.node))
        return num_bytes

    async def join_group(
        self,
        meeting: Meeting,
        rank: int,
        size: int,
        timeout_s: float,
    ) -> None:
        """Joins the group that receives weights for the nodes, see `NodeReceiver`."""
        await self._call("join_group", meeting, rank, size, timeout_s, is_for_receiver=True)

    async def collect(self, manifest: WeightManifest) -> SharedWeights:
        """Receives weights for all processes of its node."""
        weights: SharedWeights = await self._call("collect", manifest, is_for_receiver=True)
        return weights

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

    async def _call(self, method: str, *args: Any, is_for_receiver: bool = False) -> Any:
        if self._has_ended:
            raise ServerError(f"{self.name} is closed")
        if self.is_gone:
            raise self._error_of_end()
        number = next(self._numbers)
        answer = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            self._send(ServerCall(number, method, args, is_for_receiver))
            return await answer
        except asyncio.CancelledError:
            self._abandon()
            self._send(ServerCall(number))
            raise
        finally:
            self._waiting.pop(number, None)

    def _abandon(self) -> None:
        """Notes that nobody waits for a call any more. Past the deadline, adds the process's stacks to the
        error."""
        wait = self._watchdog.expired()
        if wait is not None:
            add_stacks(wait, self.name, self.process.life.stacks())

    def _send(self, call: ServerCall) -> None:
        self._due.append((call.number, pack(call)))
        if len(self._due) == 1:
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """Sends the calls that are due."""
        due = self._due
        self._due = []
        is_sent = True
        try:
            self.process.channel.send(joined([message for _, message in due]))
        except OSError:
            is_sent = False
        # The thread that reads may have ended before these calls waited.
        if not is_sent or self.is_gone:
            for number, _ in due:
                self._resolve(number, Reply(error=self._error_of_end()))

    def _error_of_end(self) -> ConnectionError:
        return ConnectionError(f"{self.name} has ended: {self.process.life.fate()}")

    def _read_replies(self) -> None:
        """Runs in the thread: passes replies to the event loops that wait for them."""
        try:
            while True:
                for message in parted(self.process.channel.receive_packed()):
                    number, reply = unpack(message)
                    self._resolve(number, reply)
        except (
            EOFError,
            OSError,
            TypeError,
        ):  # TypeError: `end` closed the connection in the middle of a read
            self.process.life.is_gone = True
            for number in list(self._waiting):
                self._resolve(number, Reply(error=self._error_of_end()))

    def _resolve(self, number: int, reply: Reply) -> None:
        """Passes a reply to call `number`, on the caller's event loop. Does nothing if nobody waits for the
        call any more."""
        answer = self._waiting.get(number)
        if answer is None:
            return

        def resolve() -> None:
            # A replica's spans get their own track, since spans of one track mustn't overlap.
            self.process.channel.note(reply, track_prefix=f"{self.name}: ")
            if answer.done():
                return
            if reply.error is None:
                answer.set_result(reply.value)
            else:
                answer.set_exception(reply.error)

        with suppress(RuntimeError):  # the run's event loop is closed
            answer.get_loop().call_soon_threadsafe(resolve)


async def _started(start: Callable[[], WorkerProcess]) -> WorkerProcess:
    """The process that `start` starts, in a thread. One that comes when nobody waits for it any more is
    ended."""
    thread = DaemonThread("start of a process")
    starting = thread.start(start)
    thread.end()
    try:
        return await asyncio.wrap_future(starting)
    except asyncio.CancelledError:
        starting.add_done_callback(_end_late)
        raise


def _end_late(starting: Future[WorkerProcess]) -> None:
    if starting.cancelled() or starting.exception() is not None:
        return
    process = starting.result()
    process.life.stop()
    process.life.release()
    process.channel.close()
