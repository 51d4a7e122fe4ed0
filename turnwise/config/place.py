"""Places the roles of a config on the devices of a machine. Nothing else decides where a role runs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from turnwise.config.demand import (
    AnyConfig,
    Demand,
    contradictions,
    mapping_key,
    ray_reason,
    undivided,
    union,
    unsharded,
)
from turnwise.config.own_transfer import require_transfer
from turnwise.config.schema.agentic import AgenticConfig
from turnwise.config.schema.model_args import PlacedModel
from turnwise.config.schema.sft import SFTConfig
from turnwise.errors import ConfigError, MissingDeviceError, counted
from turnwise.runtime.machine import Machine, Node
from turnwise.runtime.placement import (
    BESIDE_TRAINERS,
    ClusterName,
    Placement,
    RolePlacement,
)
from turnwise.runtime.rank import Layout


def place(config: AnyConfig, machine: Machine, plays: bool = True) -> Placement:
    """Where every role of the config runs on this machine. Without `plays` the run trains on given episodes,
    so that it needs no process to train in while others are played. Raises ConfigError for the first of
    `contradictions`, or if the machine lacks a device, or its launcher can't run the config."""
    for problem in contradictions(config):
        raise ConfigError(f"{problem.key}: {problem.message}")
    reason = ray_reason(config, machine)
    if reason and machine.num_launched > 1:
        raise ConfigError(
            f"{reason} can't hold this run: a launcher started this process, one of several; start the run "
            "without a launcher, or remove cluster.name (auto uses launched)"
        )
    if reason:
        # Ray reserves a slot of a CPU as well, so no node has more of them than it knows.
        machine = machine.numbered_by_node(config.num_gpus_per_node)
    else:
        machine = machine.with_slots(config.num_gpus_per_node)
    demand = Demand.of(config)
    is_ahead = config.plays_ahead and plays
    devices = demand.devices(machine.num_launched)
    for role in devices:
        _require_devices(demand.naming(role), devices[role], machine)
    numbers = union(devices)
    cluster: ClusterName = "ray" if reason else _cluster(demand, len(numbers), machine, is_ahead)
    if cluster == "launched":
        _require_launchable(demand, len(numbers), machine, is_ahead)
    for problem in (*unsharded(demand, devices), *undivided(demand, devices)):
        raise ConfigError(f"{problem.key}: {problem.message}")
    placement = _placed(config, demand, devices, cluster, machine)
    if isinstance(config, AgenticConfig):
        require_transfer(config, placement)
    return replace(placement, reason=reason)


def smallest_machine(config: AnyConfig) -> Machine:
    """The smallest machine on which a config without contradictions can be placed: it has the devices that
    the config names, and a launcher if the config can't run without."""
    demand = Demand.of(config)
    devices = demand.devices(num_launched=1)
    numbers = union(devices)
    last = numbers[-1]
    num_launched = 1
    needed: list[str] = []
    if demand.cluster in ("auto", "launched") and len(demand.server_devices) <= 1:
        needed = [problem.role for problem in undivided(demand, devices)]
    if demand.cluster == "launched" or needed or any(unsharded(demand, devices)):
        sizes = [demand.roles[role].model_parallel_size for role in needed]
        num_launched = max(2, last + 1, *sizes)
        if demand.main.device_mapping:
            num_launched = len(numbers)
    last = max(last, *demand.server_devices, num_launched - 1)
    if ray_reason(config):
        last = max([last, *demand.reward_devices])
    num_devices = last + 1
    if config.num_gpus_per_node is None or not ray_reason(config):
        return Machine((Node(num_devices, "cuda"),), num_launched)
    num_nodes = -(-num_devices // config.num_gpus_per_node)
    nodes = (Node(config.num_gpus_per_node, "cuda", f"node {index}") for index in range(num_nodes))
    return Machine(tuple(nodes))


def follows(config: AnyConfig, key: str) -> bool:
    """Whether the placement of the config depends on a key about devices. True for a config with
    contradictions."""
    if any(contradictions(config)):
        return True
    placement = place(config, smallest_machine(config))
    return key not in placement.unused_keys


def lent_replicas(config: AgenticConfig, placement: Placement) -> list[int]:
    """The replicas that make room for training: those on its devices, if the run is asynchronous, trains
    on whole batches, and has a replica elsewhere."""
    if not config.plays_ahead or config.is_streamed:
        return []
    trained: set[int] = set()
    for name in placement.roles:
        trained.update(placement.roles[name].devices)
    ranks = placement.of("actor_infer").ranks
    lent = [replica for replica, devices in enumerate(ranks) if not trained.isdisjoint(devices)]
    return lent if len(lent) < len(ranks) else []


def _cluster(
    demand: Demand,
    num_devices: int,
    machine: Machine,
    is_ahead: bool,
) -> ClusterName:
    """The kind of processes that train. Raises ConfigError if `cluster.name` asks for another kind than the
    launcher's."""
    fitting: ClusterName = "local"
    if is_ahead or demand.sharded_policy or num_devices > 1:
        fitting = "process"
    if machine.num_launched > 1:
        fitting = "launched"
    if demand.cluster in ("auto", fitting):
        return fitting
    if demand.cluster == "process" and fitting == "local":
        return "process"
    reason = "a launcher started this process, one of several"
    if demand.cluster == "launched":
        reason = "no launcher started this process (torchrun, accelerate)"
    raise ConfigError(
        f"cluster.name: {demand.cluster} can't hold this run: {reason}; remove cluster.name (auto takes "
        f"{fitting})"
    )


def _require_launchable(
    demand: Demand,
    num_devices: int,
    machine: Machine,
    is_ahead: bool,
) -> None:
    """Raises ConfigError if the launcher's processes aren't one for each device, or can't run the config."""
    if num_devices != machine.num_launched:
        launched = [*range(machine.num_launched)]
        keys = [
            mapping_key(name)
            for name, role in demand.roles.items()
            if role.device_mapping not in (None, launched)
        ]
        raise ConfigError(
            f"the roles have {counted(num_devices, 'device')} with {', '.join(keys)}, "
            f"and the launcher started {counted(machine.num_launched, 'process')}; "
            "start one process for each device, or remove device_mapping"
        )
    if is_ahead:
        raise ConfigError(
            "a launcher started this run, whose processes train in the one that plays, "
            "so async_generation_ratio must be 0; "
            "start the run without a launcher to train in separate processes"
        )
    if demand.num_servers > 1:
        raise ConfigError(
            f"{mapping_key('actor_infer')} names devices of {demand.num_servers} servers, "
            "and a launcher started this run: servers in their own processes need a run without one; "
            "name one device, or start the run without a launcher"
        )


def _require_devices(role: str, devices: Sequence[int], machine: Machine) -> None:
    """Raises ConfigError if the `device_mapping` of a role, or the number of launched processes, asks for a
    missing device."""
    last = max(devices)
    num_devices = machine.num_devices
    if machine.num_per_node is not None or len(machine.nodes) > 1 or machine.is_of_ray:
        _require_nodes(role, devices, machine)
        return
    if last < num_devices:
        return
    reason = f"{mapping_key(role)} names device {last}"
    fewer = "name others"
    num_launched = machine.num_launched
    if num_launched > 1 and [*devices] == [*range(num_launched)]:
        reason = f"the launcher started {num_launched} processes for as many devices"
        fewer = f"start {num_devices} (--num_processes)"
    if machine.accelerator:
        raise ConfigError(
            f"{reason}, and this machine has {num_devices} CUDA devices (0 to {num_devices - 1}): {fewer}"
        )
    raise ConfigError(
        f"{reason}, and this machine has {counted(num_devices, 'slot')} (without accelerators a device is a "
        f"slot of the CPU, one for each core): {fewer}, or set num_gpus_per_node: {last + 1} for more slots "
        "than cores"
    )


def _require_nodes(role: str, devices: Sequence[int], machine: Machine) -> None:
    """Raises MissingDeviceError if a node that Ray knows lacks a device that the role names."""
    hosts = [node for node in machine.nodes if node.num_devices]
    sizes = ", ".join(f"{node.name or 'this machine'} {node.num_devices}" for node in hosts)
    for device in devices:
        if machine.has(device):
            continue
        reason = f"{mapping_key(role)} names device {device}"
        if machine.num_per_node is not None:
            index, number = divmod(device, machine.num_per_node)
            reason += f", device {number} of node {index} (num_gpus_per_node: {machine.num_per_node})"
        raise MissingDeviceError(
            f"{reason}, and the nodes that Ray knows have these numbers of devices: {sizes}; name other "
            "devices, or add nodes to it (`ray start --address=HOST:PORT` on each)"
        )


def _require_one_node(replicas: Sequence[Sequence[int]], machine: Machine) -> None:
    """Raises ConfigError if an inference server would have devices of several nodes."""
    for number, devices in enumerate(replicas):
        nodes = {machine.locate(device)[0] for device in devices}
        if len(nodes) > 1:
            names = " and ".join(machine.nodes[index].name or f"node {index}" for index in sorted(nodes))
            numbers = ", ".join(map(str, devices))
            raise ConfigError(
                f"{mapping_key('actor_infer')} gives replica {number} the devices {numbers}, "
                f"which are on {names}; a replica has to be on one node: name other devices, or use a "
                "smaller tensor-parallel size"
            )


def _placed(
    config: AnyConfig,
    demand: Demand,
    devices: Mapping[str, tuple[int, ...]],
    cluster: ClusterName,
    machine: Machine,
) -> Placement:
    numbers = union(devices)
    roles = {name: _trained(role, devices[name], numbers) for name, role in demand.roles.items()}
    if isinstance(config, SFTConfig):
        return Placement(cluster, machine, numbers, roles)
    server_devices = _server_devices(demand, cluster)
    if server_devices:
        _require_devices("actor_infer", server_devices, machine)
        _require_one_node(_replicas(server_devices, config.actor_infer.model_parallel_size), machine)
    if cluster == "ray" and demand.reward_devices:
        _require_devices("reward", demand.reward_devices, machine)
    return Placement(
        cluster,
        machine,
        numbers,
        roles,
        _served(config, server_devices, numbers, cluster),
        _unused_keys(demand, server_devices, machine, follows_reward=cluster == "ray"),
    )


def _layout(role: PlacedModel, num_devices: int) -> Layout:
    num_replicas = max(num_devices // role.model_parallel_size, 1)
    return Layout(
        num_replicas,
        role.tensor_parallel_size,
        role.pipeline_parallel_size,
        role.context_parallel_size,
    )


def _trained(role: PlacedModel, devices: tuple[int, ...], numbers: tuple[int, ...]) -> RolePlacement:
    """A rank on each device, in the device's process."""
    ranks = tuple((device,) for device in devices)
    processes = tuple(numbers.index(device) for device in devices)
    return RolePlacement(ranks, processes, _layout(role, len(devices)))


def _server_devices(demand: Demand, cluster: ClusterName) -> tuple[int, ...]:
    """The devices of the inference servers; empty if the only server is on the first training device. A
    server in the trainer's process can't leave the trainer's device, since it may read the trainer's
    weights."""
    if cluster == "local" and len(demand.server_devices) <= 1:
        return ()
    return tuple(demand.server_devices)


def _served(
    config: AgenticConfig,
    server_devices: tuple[int, ...],
    numbers: tuple[int, ...],
    cluster: ClusterName,
) -> dict[str, RolePlacement]:
    """The inference servers, and the reward role's model. Under Ray each has a process of its own; else the
    reward role's model is in the run's process."""
    process = BESIDE_TRAINERS if cluster == "process" else 0
    role = config.actor_infer
    first_device = numbers[:1]
    ranks = _replicas(server_devices, role.model_parallel_size) or (first_device,)
    processes: tuple[int, ...] = (process,)
    num_trainers = len(numbers)
    num_processes = num_trainers + len(ranks)
    if len(ranks) > 1 or cluster == "ray":
        processes = tuple(range(num_trainers, num_processes))
    layout = _layout(role, len(server_devices))
    served = {"actor_infer": RolePlacement(ranks, processes, layout)}
    if config.needs_reward_role:
        device = first_device
        if server_devices and cluster != "local":
            device = server_devices[:1]
        if cluster == "ray":
            device = tuple(config.reward.device_mapping or device)
            process = num_processes
        served["reward"] = RolePlacement((device,), (process,))
    return served


def _replicas(devices: tuple[int, ...], size: int) -> tuple[tuple[int, ...], ...]:
    """The devices in groups of `size`, in their order."""
    starts = range(0, len(devices), size)
    return tuple(devices[start : start + size] for start in starts)


def _unused_keys(
    demand: Demand,
    server_devices: tuple[int, ...],
    machine: Machine,
    follows_reward: bool,
) -> frozenset[str]:
    unused: set[str] = set()
    if not server_devices:
        unused.add(mapping_key("actor_infer"))
    names_devices = any(role.device_mapping for role in demand.roles.values())
    if follows_reward and demand.reward_devices:
        names_devices = True
    if not names_devices and not server_devices and machine.num_launched == 1:
        unused.add("num_gpus_per_node")
    return frozenset(unused)
