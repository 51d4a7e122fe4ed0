"""What a run holds of Ray: devices of its nodes, an agent on each node, and the actors there."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from turnwise.cluster.actor_host import ActorHost, HostFacts
from turnwise.cluster.beats import Heartbeat, Looking, NodeMonitor, ProcessKey
from turnwise.cluster.channel import Channel
from turnwise.cluster.growing import LOOK_S, REPORT_S, amounts
from turnwise.cluster.node_agent import NodeAgent, WatchSettings
from turnwise.cluster.node_facts import NodeFacts
from turnwise.cluster.node_part import (
    NodePart,
    Spread,
    actor_environment,
    failed_start,
    lacking_agent,
    require_paths,
    require_versions,
)
from turnwise.cluster.process import WorkerProcess
from turnwise.cluster.ray_actor import ActorLife, ActorWire
from turnwise.cluster.ray_growth import free_amounts
from turnwise.cluster.ray_session import leave_ray
from turnwise.cluster.ray_settings import RaySettings
from turnwise.errors import DeadlineError, WorkerError
from turnwise.runtime.machine import Node
from turnwise.runtime.placement import Placement
from turnwise.runtime.stopwatch import Stopwatch
from turnwise.runtime.watchdog import Watchdog

logger = logging.getLogger(__name__)

_GROUPS = {"arriving": 1, "leaving": 1, "control": 2}
"""Groups of threads of an actor: for messages in either direction, and for questions about it."""
_AGENT_CALLS = 4
"""How many questions an agent answers at the same time: it beats while it collects stacks."""


class RayHosts:
    """The processes of a run under Ray. Reserves the devices of `placement`, on the nodes of its machine,
    which `join_ray` has made. Starts actors there, until `close`, which leaves Ray."""

    def __init__(
        self,
        placement: Placement,
        settings: RaySettings,
        watchdog: Watchdog,
        stopwatch: Stopwatch,
    ) -> None:
        self.placement = placement
        self.settings = settings
        self._watchdog = watchdog
        self._stopwatch = stopwatch
        self._reserved: Any = None
        self._parts: dict[int, NodePart] = {}
        self._agents: list[Any] = []
        self._wires: dict[int, dict[str, ActorWire]] = {}
        """Index of a node → name of an actor there → its wire."""
        self._actors: list[Any] = []
        self._spread = Spread()
        """Places the processes without a device."""
        self._lost: dict[int, str] = {}
        """Index of each lost node → why it counts as lost."""
        self._endings: list[Callable[[], object]] = []
        self._looking: Looking | None = None
        self._is_closed = False
        with ExitStack() as on_error:
            on_error.callback(self.close)
            with self._waiting():
                self._reserve()
            self._begin_beats()
            on_error.pop_all()

    def start(self, module: str, names: Sequence[str], devices: Sequence[int]) -> list[WorkerProcess]:
        """See `Hosts`. An actor calls the function `answer_all` of the module with its end of the wire, and
        sees all devices that the run has on its node."""
        with self._waiting():
            return self._start(module, names, devices)

    def _waiting(self) -> Any:
        start_s = self.settings.start_s
        return self._watchdog.waiting(
            "the run",
            "Ray to start its actors",
            start_s,
            "deadlines.start_s",
        )

    def _start(self, module: str, names: Sequence[str], devices: Sequence[int]) -> list[WorkerProcess]:
        indices = [self.placement.machine.locate(device)[0] for device in devices]
        return self._start_on(module, names, indices)

    def start_beside(self, module: str, name: str) -> WorkerProcess:
        """See `Hosts`. Nodes without a device of the run get no process."""
        remaining = [index for index in self._parts if index not in self._lost]
        if not remaining:
            raise WorkerError(f"{name} can't be started: all nodes of the run are lost")
        index = self._spread.add({index: self._parts[index].facts.num_cores for index in remaining})
        leave = partial(self._spread.remove, index)
        with ExitStack() as on_error:
            on_error.callback(leave)
            with self._waiting():
                [process] = self._start_on(module, [name], [index], leave)
            on_error.pop_all()
        return process

    def before_close(self, end: Callable[[], object]) -> None:
        self._endings.append(end)

    @property
    def num_cores(self) -> int:
        """See `Hosts`."""
        return sum(part.facts.num_cores for part in self._parts.values())

    def _start_on(
        self,
        module: str,
        names: Sequence[str],
        indices: Sequence[int],
        leave: Callable[[], object] | None = None,
    ) -> list[WorkerProcess]:
        """Starts a process for each name, on the node of its index. With `leave`, which is called when it has
        ended, it sees no device."""
        bundles = list(self._parts)
        actors: list[Any] = []
        for index in indices:
            part = self._parts[index]
            options = {"num_cpus": 0, "concurrency_groups": _GROUPS}
            environment = actor_environment(part)
            if leave is not None:
                environment["CUDA_VISIBLE_DEVICES"] = ""
            bundle = bundles.index(index)
            actors.append(
                self._remote(
                    ActorHost,
                    bundle,
                    environment,
                    part.facts.agent,
                    **options,
                )
            )
        self._actors += actors
        answers = [actor.facts.options(concurrency_group="control").remote() for actor in actors]
        with ExitStack() as on_error:
            for actor in actors:
                on_error.callback(ray.kill, actor)
            self._wait_for(answers, indices)
            all_facts = [
                self._answer(answer, name, index)
                for answer, name, index in zip(answers, names, indices, strict=True)
            ]
            on_error.pop_all()
        processes: list[WorkerProcess] = []
        for name, index, actor, facts in zip(names, indices, actors, all_facts, strict=True):
            actor.serve.remote(module)
            processes.append(self._process(name, index, actor, facts, leave))
        return processes

    def _answer(self, answer: Any, name: str, index: int) -> HostFacts:
        """The facts of an actor that has answered. Raises WorkerError if it has ended instead."""
        try:
            facts: HostFacts = ray.get(answer)
        except RayError as error:
            raise failed_start(name, self.placement.machine.nodes[index], error) from error
        return facts

    def _wait_for(self, answers: Sequence[Any], indices: Sequence[int]) -> None:
        """Waits until all actors of these nodes answer. Raises WorkerError if one of the nodes is lost: Ray
        would start its actor when the node is back."""
        while True:
            for index in indices:
                if index in self._lost:
                    node = self.placement.machine.nodes[index]
                    raise WorkerError(f"no process can be started: node {node.name} {self._lost[index]}")
            if len(ray.wait(answers, num_returns=len(answers), timeout=LOOK_S)[0]) == len(answers):
                return

    def _process(
        self,
        name: str,
        index: int,
        actor: Any,
        facts: HostFacts,
        leave: Callable[[], object] | None,
    ) -> WorkerProcess:
        part = self._parts[index]
        part.agent.add_host.remote(facts.process)
        wire = ActorWire(actor)
        place = f" on {part.node.name}"
        full_name = name.removesuffix(place) + place  # one that is started again has the name of the first
        self._wires.setdefault(index, {})[full_name] = wire
        if index in self._lost:  # since its actor has answered
            wire.lose(f"node {part.node.name} {self._lost[index]}")
        logger.info("%s is process %d", full_name, facts.process.number)
        life = ActorLife(actor, wire, part.agent, facts, leave)
        return WorkerProcess(full_name, life, Channel(wire, self._stopwatch, full_name))

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
        self._start_agents(nodes, resources)
        for (index, numbers), agent in zip(used.items(), self._agents, strict=False):
            node = self.placement.machine.nodes[index]
            facts = self._facts(node, agent)
            self._parts[index] = NodePart(node, numbers, agent, facts)

    def _facts(self, node: Node, agent: Any) -> NodeFacts:
        """What a node is. Raises WorkerError if no process of the run can work there."""
        paths = self.settings.paths
        answers = [agent.facts.remote(), agent.missing.remote(paths)]
        try:
            facts, missing = ray.get(answers)
        except RayError as error:
            raise lacking_agent(node, error) from error
        require_versions(node, facts)
        require_paths(node, missing, paths)
        logger.info("node %s has %s", node.name, facts.describe())
        return facts

    def _start_agents(self, nodes: Sequence[Node], resources: Sequence[Mapping[str, float]]) -> None:
        """Starts an agent on each of these nodes, and one on this process's node if it isn't among them: the
        others ask that one how this process is."""
        driver = ProcessKey.of_this()
        settings = WatchSettings(driver, self.settings.node_s, self.settings.stopped_s)
        here = ray.get_runtime_context().get_node_id()
        homes = [number for number, node in enumerate(nodes) if node.key == here]
        agents: dict[int, Any] = {}
        if homes:
            number = homes[0]
            home = self._start_agent(number, resources[number], settings)
            agents[number] = home
        else:
            strategy = NodeAffinitySchedulingStrategy(here, soft=False)
            options = {"num_cpus": 0, "max_concurrency": _AGENT_CALLS}
            home = ray.remote(scheduling_strategy=strategy, **options)(NodeAgent).remote(settings)
        for number, bundle in enumerate(resources):
            if number not in agents:
                agents[number] = self._start_agent(number, bundle, settings, home)
        self._agents = [agents[number] for number in range(len(nodes))]
        if not homes:
            self._agents.append(home)
        try:
            state = ray.get(home.driver_state.remote())
        except RayError as error:
            raise lacking_agent(Node(name="of this process"), error) from error
        if state == "ended":
            raise WorkerError(
                f"Ray's processes on this node don't see this one (number {driver.number}): run Ray and "
                "turnwise in the same container"
            )

    def _start_agent(self, number: int, bundle: Mapping[str, float], *args: Any) -> Any:
        options = {"num_gpus": bundle.get("GPU", 0), "num_cpus": 0, "max_concurrency": _AGENT_CALLS}
        return self._remote(NodeAgent, number, *args, **options)

    def _used_devices(self) -> dict[int, tuple[int, ...]]:
        """Index of each node with a device of the run → those devices, as they are numbered there."""
        used: dict[int, list[int]] = {}
        for device in self.placement.all_devices:
            index, number = self.placement.machine.locate(device)
            used.setdefault(index, []).append(number)
        return {index: tuple(numbers) for index, numbers in sorted(used.items())}

    def _wait_for_devices(self, nodes: Sequence[Node], resources: Sequence[Mapping[str, float]]) -> None:
        """Waits until Ray has reserved the devices. Says every few seconds what is awaited. Raises
        DeadlineError if others keep them, and WorkerError if one of the nodes is lost."""
        start_s = self.settings.start_s or float("inf")
        # Just before the watchdog, which knows no nodes.
        end = time.monotonic() + start_s - 2 * LOOK_S
        report = time.monotonic() + REPORT_S
        while not self._reserved.wait(LOOK_S):
            _require_alive(nodes)
            if time.monotonic() >= end:
                lacking = "; ".join(self._lacking(nodes, resources))
                raise DeadlineError(
                    f"the run waited {start_s:g} s for devices that others hold: {lacking}; name devices of "
                    "other nodes, wait until they end, or raise deadlines.start_s"
                )
            if time.monotonic() < report:
                continue
            report = time.monotonic() + REPORT_S
            awaited = "; ".join(
                f"{amounts(bundle)} of {node.name}" for node, bundle in zip(nodes, resources, strict=True)
            )
            logger.info("waiting for Ray to reserve %s; free are %s", awaited, free_amounts())

    def _lacking(self, nodes: Sequence[Node], resources: Sequence[Mapping[str, float]]) -> Iterator[str]:
        """Yields what each node doesn't have free."""
        for node, bundle in zip(nodes, resources, strict=True):
            selector = {"ray.io/node-id": node.key}
            trial = placement_group([dict(bundle)], strategy="PACK", bundle_label_selector=[selector])
            if not trial.wait(LOOK_S):
                yield f"{amounts(bundle)} of {node.name}"
            remove_placement_group(trial)

    def _remote(self, kind: Any, bundle: int, *args: Any, **options: Any) -> Any:
        """Starts an actor of a class on a node of the run."""
        strategy = PlacementGroupSchedulingStrategy(self._reserved, placement_group_bundle_index=bundle)
        return ray.remote(scheduling_strategy=strategy, **options)(kind).remote(*args)

    def _begin_beats(self) -> None:
        heartbeats: dict[int, Heartbeat] = {}
        for index, part in self._parts.items():
            heartbeats[index] = Heartbeat(part.beat, self.settings.node_s)
        monitor = NodeMonitor(heartbeats, self.settings.node_s, self._lose)
        self._looking = Looking("node beats", monitor.look)

    def _lose(self, index: int, reason: str) -> None:
        """Ends the calls of a node's actors. What still lives there ends itself."""
        self._lost[index] = reason
        node = self.placement.machine.nodes[index]
        wires = dict(self._wires.get(index, {}))  # another thread may add one
        loss = f"node {node.name} {reason}; it had {', '.join(wires) or 'no process of the run'}"
        logger.error("%s", loss)
        for wire in wires.values():
            wire.lose(loss)

    @property
    def environment(self) -> dict[str, str]:
        """See `Hosts`: Ray sets it, and `actor_environment`."""
        return {}

    def node_name(self, device: int) -> str:
        return self.part_of(device).node.name

    def part_of(self, device: int) -> NodePart:
        """What the run has of the node of a device."""
        index, _ = self.placement.machine.locate(device)
        return self._parts[index]

    def device_name(self, device: int) -> str:
        """Torch's name for a device, in the actors of its node."""
        _, number = self.placement.machine.locate(device)
        return self.part_of(device).device_name(number)

    @property
    def is_on_one_machine(self) -> bool:
        return len({part.node.address for part in self._parts.values()}) == 1

    def close(self) -> None:
        """Ends what is still there, and leaves Ray. Calling it again is harmless."""
        if self._is_closed:
            return
        self._is_closed = True
        with ExitStack() as endings:
            endings.callback(leave_ray)
            if self._reserved is not None:
                endings.callback(remove_placement_group, self._reserved)
            for actor in self._agents + self._actors:
                endings.callback(ray.kill, actor)
            if self._looking is not None:
                endings.callback(self._looking.end)
            for end in self._endings:
                endings.callback(end)


def _require_alive(nodes: Sequence[Node]) -> None:
    """Raises WorkerError if Ray has lost one of the nodes. It knows a node that was frozen for a minute after
    its end, and a run that starts meanwhile may have chosen its devices."""
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    for node in nodes:
        if node.key not in alive:
            raise WorkerError(
                f"node {node.name} was lost while the run waited for its devices; start the run again, "
                "on the nodes that are there now"
            )
