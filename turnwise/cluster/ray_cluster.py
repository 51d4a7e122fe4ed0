"""Roles in actors of Ray, on the nodes that it knows. The one module that imports ray."""

import ipaddress
import logging
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from turnwise.cluster.actor_host import ActorHost, Heard, HostFacts
from turnwise.cluster.channel import Channel
from turnwise.cluster.messages import Command, Network, Parcel
from turnwise.cluster.node_agent import NodeAgent
from turnwise.cluster.node_part import NodePart, actor_environment, require_versions
from turnwise.cluster.process import WorkerProcess
from turnwise.cluster.process_cluster import ProcessCluster
from turnwise.cluster.process_life import ProcessLife
from turnwise.cluster.rank_process import CallSettings, ConnectedRanks
from turnwise.cluster.ray_settings import RayLines, RaySettings, fate_text
from turnwise.cluster.wire import Message
from turnwise.errors import NotAvailableError
from turnwise.runtime.machine import Machine, Node
from turnwise.runtime.rank import RankContext

logger = logging.getLogger(__name__)

_MAIN = "turnwise.cluster.child:answer_all"
_REPORT_S = 10.0  # seconds between two reports of what a start waits for
_LOOK_S = 0.5  # seconds between two looks whether a wire has been closed
_ANSWER_S = 10.0  # seconds to wait for a node's agent
_TAIL_LINES = 20
_SHARED_BYTES = 100_000  # a smaller command costs less to send several times than to put
_GROUPS = {"arriving": 1, "leaving": 1, "control": 2}
"""Groups of threads of an actor: for messages in either direction, and for questions about it."""
_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals whose handlers `ray.init` replaces: with Ray's own a run ends with nothing saved."""
_FOREIGN = ("SLURM_", "PMI_", "PMIX_")
"""Variables by which libraries would join the processes of a scheduler's job step instead of ours."""
_NUM_STARTS = 3
"""How often a Ray of the run's own is started: on a busy machine it gives up after 30 s, which no setting
changes."""
_VARIABLES = {"RAY_USAGE_STATS_ENABLED": "0"}
_OWN_VARIABLES = {"RAY_memory_monitor_refresh_ms": "0"}
"""Variables of a Ray that a run starts: without its monitor, which would kill actors because of what other
programs of this machine use."""


def join_ray(settings: RaySettings, num_slots: int = 1) -> Machine:
    """The machine of the Ray that this process joins, or starts. Its nodes are sorted by address, the head
    first; one that Ray starts here has at least `num_slots` slots. A process that has joined already stays.
    Raises NotAvailableError if Ray can't be joined."""
    if not ray.is_initialized():
        _join(settings, num_slots)
    return Machine(_nodes())


def leave_ray() -> None:
    """Leaves Ray, and ends it if this process has started it."""
    if isinstance(sys.stdout, RayLines):
        sys.stdout = sys.stdout.stream
    with _handlers_kept():
        ray.shutdown()


def _join(settings: RaySettings, num_slots: int) -> None:
    for name in list(os.environ):
        if name.startswith(_FOREIGN):
            del os.environ[name]
    os.environ.update(_VARIABLES)
    options: dict[str, Any] = {"address": settings.address or "local"}
    if not settings.address:
        os.environ.update(_OWN_VARIABLES)
        options["num_cpus"] = max(num_slots, os.cpu_count() or 1)
        options["include_dashboard"] = False
    if settings.runtime_env:
        options["runtime_env"] = dict(settings.runtime_env)
    num_attempts = 1 if settings.address else _NUM_STARTS
    for attempt in range(1, num_attempts + 1):
        try:
            with _handlers_kept():
                ray.init(**options, log_to_driver=False, configure_logging=False)
            break
        except Exception as error:  # boundary: a start of Ray that takes too long raises an Exception
            reason = str(error).strip().splitlines()[0]
            if attempt == num_attempts:
                raise NotAvailableError(f"{_failure(settings)}: {reason}") from error
            logger.warning("ray: %s (start %d of %d)", reason, attempt, num_attempts)
    sys.stdout = RayLines(sys.stdout)


def _failure(settings: RaySettings) -> str:
    if not settings.address:
        return "this run can't start a Ray of its own; cluster.address joins one that runs"
    advice = "`ray status` says whether it runs, and a token that it asks for is read from ~/.ray/auth_token"
    return f"this run can't join the Ray at cluster.address {settings.address} ({advice})"


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """Restores the handlers of the signals that Ray handles itself."""
    handlers = {number: signal.getsignal(number) for number in _HANDLED}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)


def _nodes() -> tuple[Node, ...]:
    """The nodes that Ray knows. If some have accelerators, the others have no device."""
    facts = [node for node in ray.nodes() if node["Alive"]]
    facts.sort(key=_order)
    has_accelerators = any(node["Resources"].get("GPU") for node in facts)
    nodes: list[Node] = []
    for node in facts:
        num_devices = int(node["Resources"].get("GPU" if has_accelerators else "CPU", 0))
        accelerator = "cuda" if has_accelerators and num_devices else ""
        address = node["NodeManagerAddress"]
        name = node["NodeName"] if node["NodeName"] != address else node["NodeManagerHostname"]
        nodes.append(Node(num_devices, accelerator, name, address, node["NodeID"]))
    return tuple(nodes)


def _order(node: Mapping[str, Any]) -> tuple[bool, Any, str]:
    is_head = "node:__internal_head__" in node["Resources"]
    return not is_head, ipaddress.ip_address(node["NodeManagerAddress"]), node["NodeID"]


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

    def send(self, message: Any) -> None:
        """Sends a message, or a reference to one."""
        with self._sending:
            self._unconfirmed.append(message)
            self._deliver(self._num_confirmed + len(self._unconfirmed) - 1, message)

    def receive(self) -> Message:
        while not self._arrived:
            heard = self._heard()
            self._num_arrived += len(heard.messages)
            self._arrived += heard.messages
        return self._arrived.popleft()

    def close(self) -> None:
        self._is_closed = True

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
        except ActorUnavailableError as error:
            # The call may or may not have been executed: that isn't the actor's end.
            logger.warning("ray: %s", error)
            self._repeat()
            return Heard(self._num_confirmed, [])
        except RayActorError as error:
            self.cause = str(error)
            raise EOFError from error
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
    """The life of an actor that hosts workers, and what its node's agent says of it."""

    def __init__(self, actor: Any, wire: ActorWire, agent: Any, facts: HostFacts) -> None:
        self.process_id = facts.process_id
        self._actor = actor
        self._wire = wire
        self._agent = agent
        self._facts = facts

    def kill(self) -> None:
        ray.kill(self._actor)

    def stop(self) -> bool:
        self._wire.close()
        self.kill()
        return True

    def release(self) -> None: ...

    def stacks(self) -> str:
        return self._answer("stacks", self.process_id, self._facts.stacks)

    def fate(self) -> str:
        tail = self._answer("tail", self._facts.stderr, _TAIL_LINES)
        fate = fate_text(self._wire.cause)
        return f"{fate}; the last lines of its standard error:\n{tail}" if tail else fate

    def _answer(self, method: str, *args: Any) -> str:
        try:
            return str(ray.get(getattr(self._agent, method).remote(*args), timeout=_ANSWER_S))
        except RayError as error:
            return f"its node's agent doesn't answer ({type(error).__name__})"


class RayCluster(ProcessCluster):
    """Spawns each role in the actors of its placement, one per device, on the nodes of `placement.machine`,
    which `join_ray` has made. For the other arguments see `ProcessCluster`."""

    def __init__(self, *args: Any, ray_settings: RaySettings, **kwargs: Any) -> None:
        self._ray_settings = ray_settings
        self._reserved: Any = None
        self._parts: dict[int, NodePart] = {}
        super().__init__(*args, **kwargs)

    def _start(self, settings: CallSettings, begin: Callable[[], object]) -> None:
        start_s = self._ray_settings.start_s
        with settings.watchdog.waiting("the run", "Ray to start its actors", start_s, "deadlines.start_s"):
            self._reserve()
            self._start_actors(settings)
        self._set_up({}, begin)
        if self.placement.num_processes > 1:
            self._join(self._meeting())

    def _reserve(self) -> None:
        """Reserves the devices of each node, and starts the node's agent, which holds its accelerators."""
        used = self._used_devices()
        nodes = [self.placement.machine.nodes[index] for index in used]
        resources: list[dict[str, float]] = []
        for node, numbers in zip(nodes, used.values(), strict=True):
            kind = "GPU" if node.accelerator else "CPU"
            resources.append({kind: len(numbers)})
        selectors = [{"ray.io/node-id": node.key} for node in nodes]
        self._reserved = placement_group(resources, strategy="PACK", bundle_label_selector=selectors)
        self._wait_for_devices(nodes, resources)
        agents: list[Any] = []
        for number, bundle in enumerate(resources):
            options = {"num_gpus": bundle.get("GPU", 0), "num_cpus": 0}
            agents.append(self._remote(NodeAgent, number, **options))
        facts = ray.get([agent.facts.remote() for agent in agents])
        pairs = zip(used.items(), agents, facts, strict=True)
        for (index, numbers), agent, node_facts in pairs:
            node = self.placement.machine.nodes[index]
            require_versions(node, node_facts)
            self._parts[index] = NodePart(node, numbers, agent, node_facts)

    def _used_devices(self) -> dict[int, tuple[int, ...]]:
        """Index of each node with a device of the run → those devices, as they are numbered there."""
        used: dict[int, list[int]] = {}
        for device in sorted(self.placement.devices):
            index, number = self.placement.machine.locate(device)
            used.setdefault(index, []).append(number)
        return {index: tuple(numbers) for index, numbers in sorted(used.items())}

    def _wait_for_devices(self, nodes: Sequence[Node], resources: Sequence[Mapping[str, float]]) -> None:
        """Waits until Ray has reserved the devices. Says every few seconds what is awaited."""
        report = time.monotonic() + _REPORT_S
        while not self._reserved.wait(_LOOK_S):
            if time.monotonic() < report:
                continue
            report = time.monotonic() + _REPORT_S
            awaited = "; ".join(
                f"{_amounts(bundle)} of {node.name}" for node, bundle in zip(nodes, resources, strict=True)
            )
            logger.info("waiting for Ray to reserve %s; free are %s", awaited, _amounts(_free_resources()))

    def _remote(self, kind: Any, bundle: int, *args: Any, **options: Any) -> Any:
        """Starts an actor of a class on a node of the run."""
        strategy = PlacementGroupSchedulingStrategy(self._reserved, placement_group_bundle_index=bundle)
        return ray.remote(scheduling_strategy=strategy, **options)(kind).remote(*args)

    def _start_actors(self, settings: CallSettings) -> None:
        bundles = list(self._parts)
        actors: list[Any] = []
        for device in self.placement.devices:
            index, _ = self.placement.machine.locate(device)
            environment = actor_environment(self._parts[index])
            options = {"num_cpus": 0, "concurrency_groups": _GROUPS}
            actors.append(self._remote(ActorHost, bundles.index(index), environment, **options))
        asked = [actor.facts.options(concurrency_group="control").remote() for actor in actors]
        for number, (actor, facts) in enumerate(zip(actors, ray.get(asked), strict=True)):
            part = self._part(self.placement.devices[number])
            actor.serve.remote(_MAIN)
            wire = ActorWire(actor)
            life = ActorLife(actor, wire, part.agent, facts)
            process = WorkerProcess(
                f"{self._name(number)} on {part.node.name}", life, Channel(wire, settings.stopwatch)
            )
            self._processes.append(ConnectedRanks(process, settings))

    def _part(self, device: int) -> NodePart:
        index, _ = self.placement.machine.locate(device)
        return self._parts[index]

    def _device_name(self, device: int) -> str:
        _, number = self.placement.machine.locate(device)
        return self._part(device).device_name(number)

    def _meeting(self) -> Any:
        """Where the processes meet: at a store of the first one, at its node's address."""
        host = self._part(self.placement.devices[0]).node.address
        return self._processes[0].start("opening a store", Parcel(Command("open_store", (host,)))).result()

    def _network(self, number: int) -> Network:
        device = self.placement.devices[number]
        addresses = {part.node.address for part in self._parts.values()}
        name = self._device_name(device)
        if len(addresses) == 1:
            return Network(name, self.placement.groups)
        address = self._part(device).node.address
        return Network(name, self.placement.groups, address, self._ray_settings.interface)

    def _context(self, role: str, rank: int) -> RankContext:
        context = super()._context(role, rank)
        [device, *_] = self.placement.of(role).ranks[rank]
        return replace(context, device=self._device_name(device))

    def _parcel(self, command: Command, num_receivers: int) -> Parcel:
        return SharedParcel(command) if num_receivers > 1 else Parcel(command)

    def _end(self) -> None:
        with ExitStack() as endings:
            endings.callback(leave_ray)
            if self._reserved is not None:
                endings.callback(remove_placement_group, self._reserved)
            for part in self._parts.values():
                endings.callback(ray.kill, part.agent)
            endings.callback(super()._end)


def _free_resources() -> dict[str, float]:
    free = ray.available_resources()
    return {kind: free.get(kind, 0.0) for kind in ("GPU", "CPU")}


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {kind}" for kind, amount in resources.items())
