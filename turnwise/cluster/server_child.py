"""The child process of an inference server: answers calls concurrently, each as soon as it is done."""

import asyncio
import inspect
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from turnwise.cluster.child import Child, begin, portable
from turnwise.cluster.messages import Reply, joined, pack, parted, unpack
from turnwise.cluster.wire import Message, Wire
from turnwise.runtime.stopwatch import TokenCounts
from turnwise.transfer.group import NodeReceiver


class ServerCall(NamedTuple):
    """A call of a method of the server, or of the process's `NodeReceiver`. Without a method, it cancels the
    earlier call with this number."""

    number: int
    method: str = ""
    args: tuple[Any, ...] = ()
    is_for_receiver: bool = False


def serve(connection: Any, stacks: Any) -> None:
    """Answers the messages of a connection, see `answer_all`."""
    # A process group of its own, so that an engine's processes end with this one.
    os.setpgid(0, 0)
    answer_all(begin(connection, stacks))


def answer_all(wire: Wire) -> None:
    """Answers commands one by one until a server is made, then calls of the server until the other end is
    closed."""
    child = Child(wire)
    while not child.workers:
        try:
            message = wire.receive()
        except (EOFError, OSError):
            return
        wire.send(child.answer(message))
    [server] = child.workers.values()
    asyncio.run(_Calls(wire, server, child).answer_all())


class _Calls:
    """The running calls of a server."""

    def __init__(self, wire: Wire, server: Any, child: Child) -> None:
        self._wire = wire
        self._server = server
        self._receiver = NodeReceiver()
        self._stopwatch = child.stopwatch
        self._running: dict[int, asyncio.Task[None]] = {}
        self._answered: list[Message] = []
        """Replies of this tick."""

    async def answer_all(self) -> None:
        loop = asyncio.get_running_loop()
        is_over = asyncio.Event()

        def read() -> None:
            try:
                while True:
                    calls = [unpack(message) for message in parted(self._wire.receive())]
                    loop.call_soon_threadsafe(self._begin_all, calls)
            except (EOFError, OSError):
                loop.call_soon_threadsafe(is_over.set)

        threading.Thread(target=read, name="reader", daemon=True).start()
        await is_over.wait()

    def _begin_all(self, calls: Sequence[ServerCall]) -> None:
        for call in calls:
            self._begin(call)

    def _begin(self, call: ServerCall) -> None:
        if call.method:
            self._running[call.number] = asyncio.get_running_loop().create_task(
                self._answer(call), name=call.method
            )
        elif call.number in self._running:
            self._running[call.number].cancel()

    async def _answer(self, call: ServerCall) -> None:
        try:
            value = self._begun(call)
            packed = self._packed(call, Reply(await value if inspect.isawaitable(value) else value))
        except asyncio.CancelledError:
            return
        except Exception as error:  # boundary: the process that waits for the reply gets the exception
            packed = self._packed(call, Reply(error=portable(error)))
        finally:
            del self._running[call.number]
        self._answered.append(packed)
        if len(self._answered) == 1:
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """Sends the replies of this tick together."""
        with suppress(OSError):  # the thread that reads ends this process
            self._wire.send(joined(self._answered))
        self._answered = []

    def _begun(self, call: ServerCall) -> Any:
        """The value of a call, or an awaitable of it."""
        if call.is_for_receiver:
            # It blocks while weights arrive.
            return asyncio.to_thread(getattr(self._receiver, call.method), *call.args)
        return getattr(self._server, call.method)(*call.args)

    def _packed(self, call: ServerCall, reply: Reply) -> Message:
        """Adds what the stopwatch has noted since the last reply. Returns the packed reply with the call's
        number."""
        watch = self._stopwatch
        reply.spans = watch.spans
        reply.tokens = watch.tokens
        reply.num_sampled = watch.num_sampled
        watch.spans = []
        watch.tokens = TokenCounts()
        watch.num_sampled = 0
        return pack((call.number, reply))
