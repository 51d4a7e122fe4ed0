"""Where the roles of a run live, computed from its config alone, without touching a device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from turnwise.errors import ConfigError, counted
from turnwise.runtime.rank import RankContext
from turnwise.runtime.stopwatch import Stopwatch

ClusterName = Literal["local", "process", "launched"]


@dataclass(frozen=True, slots=True)
class CpuThreads:
    """Numbers of threads of torch's operators: for training, for rollouts, and for the whole run (`both`). If training and
    rollouts overlap, they split these threads as the config says. If not, each of the two uses all of them."""

    train: int
    rollout: int
    both: int


@dataclass(frozen=True, slots=True)
class RolePlacement:
    """The devices of a role, one per rank, and the processes that host the ranks."""

    devices: tuple[int, ...]
    processes: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.devices)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where each role runs. Each device has one process, which hosts the ranks of all roles on the device.

    >>> placement = place({"actor_train": [0, 1], "critic": [1]}, num_devices=2, accelerator="", is_apart=False)
    >>> placement.cluster, placement.num_processes, placement.roles["critic"].processes
    ('process', 2, (1,))
    """

    cluster: ClusterName
    """Roles run in this process (`local`), in new ones on this machine (`process`), or in those of a launcher (`launched`)."""
    accelerator: str
    """`cuda`, or empty where a device is a slot of the CPU."""
    devices: tuple[int, ...]
    """The device of each process that holds training roles."""
    roles: Mapping[str, RolePlacement]

    @property
    def num_processes(self) -> int:
        """Number of processes that hold training roles."""
        return len(self.devices)

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """The processes of each role that is on several processes but not on all, without duplicates."""
        several = dict.fromkeys(placed.processes for placed in self.roles.values() if placed.size > 1)
        return [processes for processes in several if len(processes) < self.num_processes]

    def device(self, number: int) -> str:
        """Torch's name for device `number`."""
        return f"{self.accelerator}:{number}" if self.accelerator else "cpu"

    def describe(self) -> str:
        """One line for people: the devices of every role, and the kind of processes."""
        what = "device" if self.accelerator else "slot"
        where = {"local": "in this process", "process": "a process for each", "launched": "the launcher's processes"}
        roles = [
            f"{name} on {what}{'s' if placed.size > 1 else ''} {', '.join(map(str, placed.devices))}"
            for name, placed in self.roles.items()
        ]
        return f"{'; '.join(roles)} ({where[self.cluster]})"

    def table(self, served: Mapping[str, Sequence[Sequence[int] | None]]) -> str:
        """A table with a line per device: the ranks of the training roles on it, and the replicas of served roles.

        `served` has the devices of each replica of each served role; None stands for the first device of the training roles.

        >>> placement = place({"actor_train": [0, 1]}, num_devices=4, accelerator="cuda", is_apart=False)
        >>> print(placement.table({"actor_infer": [[2, 3]]}))
        device  actor_train  actor_infer
        0       rank 0       -
        1       rank 1       -
        2       -            replica 0
        3       -            replica 0
        """
        homes = {role: [self.devices[:1] if home is None else home for home in given] for role, given in served.items()}
        columns: list[tuple[str, list[Sequence[int]]]]
        columns = [("rank", [(device,) for device in role.devices]) for role in self.roles.values()]
        columns += [("replica", given) for given in homes.values()]
        rows = [["device", *self.roles, *homes]]
        for number in sorted({device for _, places in columns for devices in places for device in devices}):
            cells = (", ".join(f"{kind} {n}" for n, devices in enumerate(at) if number in devices) for kind, at in columns)
            rows.append([str(number), *(cell or "-" for cell in cells)])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join(line.rstrip() for line in lines)

    def context(self, role: str, rank: int, stopwatch: Stopwatch | None = None) -> RankContext:
        """The context of one rank of a role. A role without a placement has one rank, on the first device."""
        placed = self.roles.get(role) or RolePlacement(self.devices[:1], (0,))
        return RankContext(
            role=role,
            rank=rank,
            world_size=placed.size,
            device=self.device(placed.devices[rank]),
            peers=placed.processes,
            stopwatch=stopwatch or Stopwatch(),
        )


def place(
    mappings: Mapping[str, Sequence[int] | None],
    *,
    num_devices: int,
    accelerator: str,
    is_apart: bool,
    num_launched: int = 1,
    cluster: str = "auto",
) -> Placement:
    """Places training roles on devices. `mappings` holds each role's `device_mapping`; None stands for that of the first role.
    If the first role has none, its devices are 0 to `num_launched` − 1, one per process of the launcher. `is_apart` keeps the
    trainer out of the rollouts' process. Raises ConfigError if a device doesn't exist, or the devices don't fit `cluster`."""
    main = next(iter(mappings))
    default = tuple(mappings[main] or range(num_launched))
    devices = {role: tuple(mapping) if mapping else default for role, mapping in mappings.items()}
    for role, named in devices.items():
        require_devices(role if mappings[role] else main, named, num_devices, accelerator, num_launched)
    numbers = sorted({device for named in devices.values() for device in named})
    alone: ClusterName = "process" if is_apart or len(numbers) > 1 else "local"
    found: ClusterName = "launched" if num_launched > 1 else alone
    if cluster not in ("auto", found):
        found = _asked(cluster, found, len(numbers), is_apart)
    if found == "launched" and len(numbers) != num_launched:
        keys = [_key(role) for role, mapping in mappings.items() if mapping and [*mapping] != [*range(num_launched)]]
        raise ConfigError(
            f"the roles have {counted(len(numbers), 'device')} with {', '.join(keys)}, and the launcher started "
            f"{counted(num_launched, 'process')}; start one process for each device, or leave device_mapping out"
        )
    if found == "launched" and is_apart:
        raise ConfigError(
            "cluster.name: launched trains in the process that plays, so async_generation_ratio must be 0; start the run "
            "without a launcher to train in separate processes"
        )
    roles = {role: RolePlacement(named, tuple(numbers.index(device) for device in named)) for role, named in devices.items()}
    return Placement(found, accelerator, tuple(numbers), roles)


def _asked(cluster: str, found: ClusterName, num_devices: int, is_apart: bool) -> ClusterName:
    if cluster == "process" and found == "local":
        return "process"
    if cluster == "launched":
        reason = "no launcher started this process (torchrun, accelerate)"
    elif found == "launched":
        reason = "a launcher started this process, one of several"
    elif is_apart:
        reason = "async_generation_ratio above 0 trains beside the rollouts"
    else:
        reason = f"the roles have {counted(num_devices, 'device')}"
    raise ConfigError(f"cluster.name: {cluster} can't hold this run: {reason}; leave cluster.name out (auto takes {found})")


def _key(role: str) -> str:
    return "device_mapping" if role == "sft" else f"{role}.device_mapping"


def require_devices(role: str, devices: Sequence[int], num_devices: int, accelerator: str, num_launched: int = 1) -> None:
    """Raises ConfigError if a role's `device_mapping`, or the number of launched processes, asks for a missing device."""
    if max(devices) < num_devices:
        return
    asked, fewer = f"{_key(role)} names device {max(devices)}", "name others"
    if num_launched > 1 and [*devices] == [*range(num_launched)]:
        asked = f"the launcher started {num_launched} processes for as many devices"
        fewer = f"start {num_devices} (--num_processes)"
    if accelerator:
        raise ConfigError(f"{asked}, and this machine has {num_devices} CUDA devices (0 to {num_devices - 1}): {fewer}")
    raise ConfigError(
        f"{asked}, and this machine has {counted(num_devices, 'slot')} (without accelerators a device is a slot of the CPU, "
        f"one for each core): {fewer}, or set num_gpus_per_node: {max(devices) + 1} for more slots than cores"
    )
