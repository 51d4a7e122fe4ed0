"""One actor of Ray: the wire to it, what is sent to several of them at once, and its life."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, ObjectLostError, RayError

from turnwise.cluster.actor_host import Heard, HostFacts
from turnwise.cluster.messages import Parcel
from turnwise.cluster.process_life import ProcessLife
from turnwise.cluster.ray_settings import Outage, fate_text, is_of_lost_node
from turnwise.cluster.wire import Message

_LOOK_S = 0.5  # seconds between two looks whether a wire has been closed
_ANSWER_S = 10.0  # seconds to wait for a node's agent
_TAIL_LINES = 20
_SHARED_BYTES = 100_000  # a smaller command costs less to send several times than to put


class ActorWire:
    """The run's end of a wire to an actor, see `HostedWire`."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._sending = threading.Lock()
        self._unconfirmed: deque[Any] = deque()
        """Messages that the actor may not have got, or their references."""
        self._num_confirmed = 0
        self._arrived: deque[Message] = deque()
        self._num_arrived = 0
        self._is_closed = False
        self.cause = ""
        """What Ray says about the actor's end; empty while it lives."""
        self.loss = ""
        """Why the actor's node counts as lost; empty while it doesn't."""
        self.outage = Outage()
        """Whether Ray doesn't know at the moment if the actor lives."""

    def send(self, message: Any) -> None:
        """Sends a message, or a reference to one."""
        with self._sending:
            self._unconfirmed.append(message)
            self._deliver(self._num_confirmed + len(self._unconfirmed) - 1, message)

    def receive(self) -> Message:
        while not self._arrived:
            if self._is_closed:
                raise EOFError
            heard = self._heard()
            self._num_arrived += len(heard.messages)
            self._arrived += heard.messages
        return self._arrived.popleft()

    def close(self) -> None:
        self._is_closed = True

    def lose(self, reason: str) -> None:
        """Closes the wire, because the actor's node is lost."""
        self.loss = reason
        self.close()

    def _deliver(self, number: int, message: Any) -> None:
        self._actor.deliver.options(concurrency_group="arriving").remote(number, message)

    def _heard(self) -> Heard:
        """The next messages, if any. Raises EOFError if the actor has ended or the wire is closed."""
        answer = self._actor.listen.options(concurrency_group="leaving").remote(self._num_arrived)
        while not ray.wait([answer], timeout=_LOOK_S)[0]:
            if self._is_closed:
                raise EOFError
        try:
            heard: Heard = ray.get(answer)
        except (ActorUnavailableError, ObjectLostError) as error:
            # The call may or may not have been executed, or its answer is lost: that isn't the actor's end.
            self.outage.note(error)
            self._repeat()
            return Heard(self._num_confirmed, [])
        except RayError as error:
            # Ray has classes of their own for some ends of actors, such as OutOfMemoryError.
            self.cause = str(error)
            raise EOFError from error
        self.outage.end()
        self._confirm(heard.num_delivered)
        return heard

    def _confirm(self, num_delivered: int) -> None:
        with self._sending:
            while self._num_confirmed < num_delivered:
                self._unconfirmed.popleft()
                self._num_confirmed += 1

    def _repeat(self) -> None:
        with self._sending:
            for number, message in enumerate(self._unconfirmed, self._num_confirmed):
                self._deliver(number, message)


class SharedParcel(Parcel):
    """A command for several actors. A large one is put into the object store once for all of them."""

    def message(self) -> Any:
        with self._packing:
            if self._message is None:
                self._message = self._put(self._packed())
            return self._message

    def _put(self, message: Message) -> Any:
        num_bytes = len(message.content) + sum(buffer.nbytes for buffer in message.buffers)
        return message if num_bytes < _SHARED_BYTES else ray.put(message)


class ActorLife(ProcessLife):
    """The life of an actor that hosts workers, and what its node's agent says of it. `leave` is called when
    it has ended."""

    def __init__(
        self,
        actor: Any,
        wire: ActorWire,
        agent: Any,
        facts: HostFacts,
        leave: Callable[[], object] | None = None,
    ) -> None:
        self.process_id = facts.process.number
        self._actor = actor
        self._wire = wire
        self._agent = agent
        self._facts = facts
        self._leave = leave

    @property
    def is_out_of_reach(self) -> bool:
        return self._wire.outage.is_on

    @property
    def has_lost_node(self) -> bool:
        return bool(self._wire.loss) or is_of_lost_node(self._wire.cause)

    def kill(self) -> None:
        ray.kill(self._actor)

    def stop(self) -> bool:
        self._wire.close()
        self.kill()
        return True

    def release(self) -> None:
        leave = self._leave
        self._leave = None
        if leave is not None:
            leave()

    def stacks(self) -> str:
        return self._answer("stacks", self.process_id, self._facts.stacks)

    def hidden_output(self) -> str:
        return self._answer("tail", self._facts.stderr, _TAIL_LINES)

    def fate(self) -> str:
        if self._wire.loss:
            return self._wire.loss
        tail = self.hidden_output()
        fate = fate_text(self._wire.cause)
        return f"{fate}; the last lines of its standard error:\n{tail}" if tail else fate

    def _answer(self, method: str, *args: Any) -> str:
        try:
            return str(ray.get(getattr(self._agent, method).remote(*args), timeout=_ANSWER_S))
        except RayError as error:
            return f"its node's agent doesn't answer ({type(error).__name__})"
