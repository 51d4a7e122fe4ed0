"""Where the roles of a run live, as a value that is printed, handed down and asked. `config.place` computes
it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

from turnwise.errors import counted
from turnwise.runtime.machine import Machine
from turnwise.runtime.rank import Layout, RankContext
from turnwise.runtime.stopwatch import Stopwatch

ClusterName = Literal["local", "process", "launched", "ray"]
_HOMES: Mapping[ClusterName, str] = {
    "local": "in this process",
    "process": "a process for each",
    "launched": "the launcher's processes",
    "ray": "an actor of Ray for each",
}
_TRAINING: Mapping[ClusterName, str] = {
    "local": "training in this process",
    "process": "a process for each training device",
    "launched": "training in the launcher's processes, one for each training device",
    "ray": "an actor of Ray for each training device",
}
BESIDE_TRAINERS = -1
"""Stands for the run's own process where training has other processes."""


@dataclass(frozen=True, slots=True)
class CpuThreads:
    """Numbers of threads of torch's operators: for training, for rollouts, and for the whole run (`total`).
    If training and rollouts overlap, they split these threads as the config says. If not, each of the two
    uses all of them."""

    train: int
    rollout: int
    total: int


@dataclass(frozen=True, slots=True)
class RolePlacement:
    """The devices and processes of a role's ranks."""

    ranks: tuple[tuple[int, ...], ...]
    """The devices of each rank: one of a rank that trains or computes, all of an inference server, which is a
    rank too."""
    processes: tuple[int, ...]
    """The number of each rank's process. Processes that train come first; servers with processes of their own
    follow."""
    layout: Layout = field(default_factory=Layout)
    """How the devices divide the model and its samples."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def devices(self) -> tuple[int, ...]:
        """All devices of the role, in the order of its ranks."""
        return tuple(chain.from_iterable(self.ranks))

    @property
    def num_replicas(self) -> int:
        """Number of copies of the model."""
        return self.layout.dp


@dataclass(frozen=True, slots=True)
class Placement:
    """Where each role runs. Each device has one process, which hosts the ranks of all training roles on the
    device.

    >>> pair = RolePlacement(((0,), (1,)), (0, 1), Layout(dp=2))
    >>> critic = RolePlacement(((1,),), (1,))
    >>> placement = Placement("process", Machine(), (0, 1), {"actor_train": pair, "critic": critic})
    >>> placement.num_processes, placement.neighbours("actor_train", 1), placement.ranks_on(0)
    (2, {'critic': 0}, {'actor_train': 0})
    """

    cluster: ClusterName
    """Roles run in this process (`local`), in new ones on this machine (`process`), in those of a launcher
    (`launched`), or in actors of Ray (`ray`)."""
    machine: Machine = field(default_factory=Machine)
    devices: tuple[int, ...] = (0,)
    """The device of each process that holds training roles."""
    roles: Mapping[str, RolePlacement] = field(default_factory=dict)
    """The roles that train or compute in calls to all of their ranks."""
    served: Mapping[str, RolePlacement] = field(default_factory=dict)
    """The roles that answer requests: `actor_infer`, whose ranks are inference servers, and `reward`."""
    unused_keys: frozenset[str] = frozenset()
    """Keys about devices that this placement doesn't follow."""
    reason: str = ""
    """Why the run uses Ray; empty if it doesn't."""

    @property
    def accelerator(self) -> str:
        """`cuda`, or empty where a device is a slot of the CPU."""
        return self.machine.accelerator

    @property
    def num_processes(self) -> int:
        """Number of processes that hold training roles."""
        return len(self.devices)

    @property
    def all_devices(self) -> tuple[int, ...]:
        """The devices of all roles, in their order."""
        devices = set(self.devices)
        for placed in self.served.values():
            devices.update(placed.devices)
        return tuple(sorted(devices))

    @property
    def trains_apart(self) -> bool:
        """Whether a server in the run's process can't read the trainer's own tensors, so that it has a copy
        of them."""
        return self.cluster != "local"

    @property
    def num_servers(self) -> int:
        """Number of inference servers."""
        servers = self.served.get("actor_infer")
        if servers is None:
            return 0
        return servers.size

    @property
    def serves_apart(self) -> bool:
        """Whether each server has a process of its own: under Ray, and where there are several. Else the only
        one is in the run's process."""
        return self.num_servers > 1 or (self.cluster == "ray" and self.num_servers == 1)

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """The processes of each role that is on several processes but not on all, without duplicates."""
        groups: list[tuple[int, ...]] = []
        for placed in self.roles.values():
            is_part = 1 < placed.size < self.num_processes
            if is_part and placed.processes not in groups:
                groups.append(placed.processes)
        return groups

    def of(self, role: str) -> RolePlacement:
        """The placement of a role. A role without one has one rank, on the first training device."""
        placed = self._all.get(role)
        return placed or RolePlacement((self.devices[:1],), (0,))

    def devices_of(self, role: str, rank: int = 0) -> tuple[str, ...]:
        """Torch's names for all devices of a rank."""
        devices = self.of(role).ranks[rank]
        return tuple(map(self.machine.device_name, devices))

    def device_of(self, role: str, rank: int = 0) -> str:
        """Torch's name for the first device of a rank."""
        return self.devices_of(role, rank)[0]

    def ranks_on(self, device: int) -> dict[str, int]:
        """The roles that share a device, each with its rank there."""
        sharing: dict[str, int] = {}
        for role, placed in self._all.items():
            for rank, devices in enumerate(placed.ranks):
                if device in devices:
                    sharing[role] = rank
        return sharing

    def neighbours(self, role: str, rank: int = 0) -> dict[str, int]:
        """The other roles whose workers this rank can reach as objects of its process, each with its rank
        there."""
        process = self.of(role).processes[rank]
        neighbours: dict[str, int] = {}
        for name, placed in self._reachable(role).items():
            if name != role and process in placed.processes:
                neighbours[name] = placed.processes.index(process)
        return neighbours

    def _reachable(self, role: str) -> Mapping[str, RolePlacement]:
        if self.cluster == "local":
            return self._all
        # The first of a launcher's processes trains in a thread of its own, beside what is served there.
        if role in self.roles:
            return self.roles
        return self.served

    def context(self, role: str, rank: int, stopwatch: Stopwatch | None = None) -> RankContext:
        """The context of one rank of a training role."""
        placed = self.of(role)
        return RankContext(
            role=role,
            rank=rank,
            world_size=placed.size,
            layout=placed.layout,
            node=self.machine.node_of(placed.ranks[rank][0]).name,
            device=self.device_of(role, rank),
            peers=placed.processes,
            stopwatch=stopwatch or Stopwatch(),
        )

    def describe(self) -> str:
        """One line for people: the devices of every training role, and the kind of processes."""
        noun = "device" if self.accelerator else "slot"
        texts: list[str] = []
        for name, placed in self.roles.items():
            plural = "s" if placed.size > 1 else ""
            numbers = ", ".join(map(str, placed.devices))
            texts.append(f"{name} on {noun}{plural} {numbers}")
        home = _HOMES[self.cluster]
        if self.reason:
            home = f"{home}; {self.reason}"
        return f"{'; '.join(texts)} ({home})"

    def table(self) -> str:
        """A table with a line per device: the ranks of the training roles on it, and the replicas of served
        roles. With several nodes, each device is also shown as its node and its number there. The last line
        says which processes there are.

        >>> trainer, server = RolePlacement(((0,),), (0,)), RolePlacement(((2, 3),), (0,), Layout(tp=2))
        >>> print(Placement("local", roles={"actor_train": trainer}, served={"actor_infer": server}).table())
        device  actor_train  actor_infer
        0       rank 0       -
        2       -            replica 0
        3       -            replica 0
        (training in this process; sampling in this process)
        """
        columns = [_column("rank", placed) for placed in self.roles.values()]
        columns += [_column("replica", placed) for placed in self.served.values()]
        has_nodes = len(self.machine.nodes) > 1
        places = ["node:device"] if has_nodes else []
        rows = [["device", *places, *self._all]]
        for device in sorted(set(chain.from_iterable(columns))):
            cells = [column.get(device, "-") for column in columns]
            if has_nodes:
                index, number = self.machine.locate(device)
                cells.insert(0, f"{self.machine.nodes[index].name or f'node {index}'}:{number}")
            rows.append([str(device), *cells])
        return f"{_aligned(rows)}\n({self._processes()})"

    @property
    def _all(self) -> dict[str, RolePlacement]:
        return {**self.roles, **self.served}

    def _processes(self) -> str:
        training = _TRAINING[self.cluster]
        if not self.num_servers:
            return training
        if not self.serves_apart:
            return f"{training}; sampling in this process"
        noun = "actor" if self.cluster == "ray" else "process"
        return f"{training}; {counted(self.num_servers, f'inference {noun}')}"


def _column(noun: str, placed: RolePlacement) -> dict[int, str]:
    """Device → what of the role is on it."""
    ranks: dict[int, list[str]] = {}
    for rank, devices in enumerate(placed.ranks):
        for device in devices:
            ranks.setdefault(device, []).append(f"{noun} {rank}")
    return {device: ", ".join(texts) for device, texts in ranks.items()}


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """The rows in lines, with cells of a column below each other."""
    columns = zip(*rows, strict=True)
    widths = [max(map(len, column)) for column in columns]
    lines: list[str] = []
    for row in rows:
        cells = map(str.ljust, row, widths)
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
