"""The child process of an environment worker: environments of one class, each called in a thread of its
own."""

import asyncio
import inspect
import os
import struct
import threading
from collections.abc import Callable, Hashable, Mapping
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Self

import torch

from turnwise.cluster.child import Child, begin, portable
from turnwise.cluster.messages import joined, pack, unpack, unsendable_part
from turnwise.cluster.wire import Message, Wire
from turnwise.errors import EnvironmentFault
from turnwise.protocols import Env, HasStateKey
from turnwise.runtime.foreign import Foreign
from turnwise.runtime.threads import DaemonThread
from turnwise.types import Reduction

ABANDON = "abandon"
"""The method of a call that interrupts the environment's running call, closes the environment and forgets
it."""
STACK = "stack"
"""The method of a call that is answered at once, with where the environment's thread stands."""
_NUMBER = struct.Struct("<q")
_NICE = 10  # an engine on the same cores comes first


class EnvCall(NamedTuple):
    """A call of one environment. Messages to a worker are lists of these."""

    number: int
    env_id: int
    method: str
    args: tuple[Any, ...] = ()


class EnvAnswer(NamedTuple):
    """The answer to the call of this number. Messages from a worker join several."""

    number: int
    value: Any = None
    error: BaseException | None = None

    def packed(self) -> Message:
        """The answer as a message. Its number stays readable if the rest isn't."""
        content, buffers = pack((self.value, self.error))
        return Message(_NUMBER.pack(self.number) + content, buffers)

    @classmethod
    def read(cls, message: Message) -> Self:
        """The answer in a message. If it can't be unpacked here, the error says so."""
        [number] = _NUMBER.unpack_from(message.content)
        try:
            value, error = unpack(Message(message.content[_NUMBER.size :], message.buffers))
        except Exception as fault:  # boundary: classes of a user are imported
            return cls(number, error=EnvironmentFault(f"an answer of a worker can't be read here: {fault}"))
        return cls(number, value, error)


class EnvFacts(NamedTuple):
    """The answer to `make`."""

    class_name: str
    metric_reductions: Mapping[str, Reduction]
    has_state_key: bool


class Stepped(NamedTuple):
    """The answer to `reset` and `step`."""

    result: Any
    """What the environment returned."""
    state_key: Hashable = None
    """The key of the state before the step; None if the environment has none."""
    rendered: Any = None
    """What `render()` returned after the call; None unless it was asked for."""


def serve(connection: Connection, stacks: Connection) -> None:
    """Runs in a forked process: answers calls until the other end is closed."""
    answer_all(begin(connection, stacks))


def answer_all(wire: Wire) -> None:
    """Answers commands one by one until environments are hosted, then calls of environments, until the other
    end is closed."""
    child = EnvChild(wire)
    while child.make_env is None:
        try:
            message = wire.receive()
        except (EOFError, OSError):
            return
        wire.send(child.answer(message))
    _Environments(wire, child.make_env).answer_all()


class EnvChild(Child):
    """Sets the process up."""

    make_env: Callable[[], Env] | None = None

    def host(self, make_env: Callable[[], Env], is_nice: bool, is_tried: bool) -> str:
        """Hosts environments that `make_env` makes. If `is_nice`, other processes come first. If `is_tried`,
        makes one, resets and closes it. Returns the part of what `reset` returned that can't be sent; empty
        if all can. Exceptions of the environment are ignored: its episodes will fail with them."""
        if is_nice:
            os.nice(_NICE)
        torch.set_num_threads(1)
        self.make_env = make_env
        if not is_tried:
            return ""
        tried = _Hosted("the first environment", make_env, lambda message: None)
        try:
            tried.make()
            reset = tried.reset(0, renders=False)
            tried.close()
        except Exception:  # boundary: the environment's
            return ""
        try:
            pack(reset)
        except Exception:  # boundary: the environment's objects define how they are pickled
            return unsendable_part(reset.result, "reset's result")
        return ""


class _Environments:
    """The environments of this process."""

    def __init__(self, wire: Wire, make_env: Callable[[], Env]) -> None:
        self._wire = wire
        self._make_env = make_env
        self._hosted: dict[int, _Hosted] = {}
        self._threads: dict[int, DaemonThread] = {}
        self._answers = SimpleQueue[Message]()

    def answer_all(self) -> None:
        threading.Thread(target=self._send, name="answers", daemon=True).start()
        while True:
            try:
                calls: list[EnvCall] = unpack(self._wire.receive())
            except (EOFError, OSError):
                return
            for call in calls:
                self._begin(call)

    def _begin(self, call: EnvCall) -> None:
        """Queues a call in the thread of its environment."""
        if call.method == "make":
            self._hosted[call.env_id] = _Hosted(
                f"environment {call.env_id}", self._make_env, self._answers.put
            )
            self._threads[call.env_id] = DaemonThread(f"environment {call.env_id}")
        thread = self._threads.get(call.env_id)
        if thread is None:
            self._answers.put(
                EnvAnswer(call.number).packed()
            )  # what is abandoned was never made, or is closed
            return
        if call.method == STACK:
            self._answers.put(EnvAnswer(call.number, thread.stack()).packed())
            return
        hosted = self._hosted[call.env_id]
        if call.method == ABANDON:
            if hosted.running:
                thread.interrupt()
            call = call._replace(method="close")
        thread.start(self._answer, call, hosted, thread)

    def _answer(self, call: EnvCall, hosted: "_Hosted", thread: DaemonThread) -> None:
        is_made = hosted.answer(call)
        if call.method == "close" or not is_made:
            self._threads.pop(call.env_id, None)
            self._hosted.pop(call.env_id, None)
            thread.end()

    def _send(self) -> None:
        """Runs in a thread: sends the answers that are there, as one message."""
        while True:
            answers = [self._answers.get()]
            while True:
                try:
                    answers.append(self._answers.get_nowait())
                except Empty:
                    break
            try:
                self._wire.send(joined(answers))
            except OSError:
                return


class _Hosted:
    """One environment. Its methods run in its thread. Coroutines run on an event loop of that thread, which
    lasts as long as the environment."""

    def __init__(self, name: str, make_env: Callable[[], Env], send: Callable[[Message], object]) -> None:
        self.running = ""
        """The call that runs now; empty if none does."""
        self._name = name
        self._make_env = make_env
        self._send = send
        self._env: Any = None
        self._runner: asyncio.Runner | None = None

    def answer(self, call: EnvCall) -> bool:
        """Makes a call and sends its answer. Returns whether there is an environment."""
        self.running = f"{self._name}.{call.method}"
        try:
            answer = EnvAnswer(call.number, getattr(self, call.method)(*call.args))
        except Exception as error:  # boundary: the process that waits for the answer gets the exception
            answer = EnvAnswer(call.number, error=portable(error))
        try:
            packed = answer.packed()
        except Exception as error:  # boundary: the environment's objects define how they are pickled
            part = unsendable_part(answer.value, "result")
            fault = EnvironmentFault(
                f"{self.running} returned {part}, which can't be sent from its worker: {error}; return plain "
                "values, or set max_env_num_per_worker to 0"
            )
            packed = EnvAnswer(call.number, error=fault).packed()
        self.running = ""
        self._send(packed)
        return self._env is not None

    def make(self) -> EnvFacts:
        env = self._called("the environment's constructor", self._make_env)
        self._env = env
        self._name = type(env).__name__
        return EnvFacts(self._name, dict(env.metric_reductions), isinstance(env, HasStateKey))

    def reset(self, seed: int | None, renders: bool) -> Stepped:
        result = self._called(f"{self._name}.reset", lambda: self._env.reset(seed=seed))
        return Stepped(result, rendered=self._rendered(renders))

    def step(self, action: str, renders: bool) -> Stepped:
        state_key = None
        if isinstance(self._env, HasStateKey):
            state_key = self._called(f"{self._name}.state_key", self._env.state_key)
        result = self._called(f"{self._name}.step", lambda: self._env.step(action))
        return Stepped(result, state_key, self._rendered(renders))

    def ask(self, method: str) -> Any:
        """The answer of another method without arguments, such as `expert_action`."""
        return self._called(f"{self._name}.{method}", getattr(self._env, method))

    def close(self) -> None:
        try:
            if self._env is not None:
                self._called(f"{self._name}.close", self._env.close)
        finally:
            if self._runner is not None:
                self._runner.close()

    def _rendered(self, renders: bool) -> Any:
        if not renders:
            return None
        try:
            return self._called(f"{self._name}.render", self._env.render)
        except NotImplementedError:
            return None

    def _called(self, name: str, function: Callable[[], Any]) -> Any:
        with Foreign(name):
            result = function()
            if not inspect.isawaitable(result):
                return result
            self._runner = self._runner or asyncio.Runner()
            return self._runner.run(_awaited(result))


async def _awaited(result: Any) -> Any:
    return await result
