"""Places the roles of a config on the devices of a machine. Nothing else decides where a role runs."""

from collections.abc import Iterator, Mapping, Sequence

from turnwise.config.problems import Problem
from turnwise.config.roles import PlacedModel
from turnwise.config.schema import AgenticConfig
from turnwise.config.sft import SFTConfig
from turnwise.errors import ConfigError, counted
from turnwise.runtime.machine import Machine, Node
from turnwise.runtime.placement import BESIDE_TRAINERS, ClusterName, Placement, RolePlacement

AnyConfig = AgenticConfig | SFTConfig
_Devices = Mapping[str, tuple[int, ...]]
_HERE = (0,)  # where a role is if nothing names its devices and no launcher has started processes


def place(config: AnyConfig, machine: Machine, plays: bool = True) -> Placement:
    """Where every role of the config runs on this machine. Without `plays` the run trains on given episodes, so that it needs
    no process to train in while others are played. Raises ConfigError for the first of `contradictions`, or if the machine
    lacks a device, or its launcher can't run the config."""
    for problem in contradictions(config):
        raise ConfigError(f"{problem.key}: {problem.message}")
    machine = machine.with_slots(config.num_gpus_per_node)
    roles = _training_roles(config)
    devices = _devices_of(roles, tuple(range(machine.num_launched)))
    for name, role in roles.items():
        _require_devices(name if role.device_mapping else next(iter(roles)), devices[name], machine)
    numbers = tuple(sorted({device for named in devices.values() for device in named}))
    is_ahead = config.plays_ahead and plays
    cluster = _cluster(config, len(numbers), machine, is_ahead)
    if cluster == "launched":
        _require_launchable(config, roles, len(numbers), machine, is_ahead)
    for name, message in _unsharded(roles, devices):
        raise ConfigError(f"{_key(name)}: {message}")
    trained = {name: _trained(role, devices[name], numbers) for name, role in roles.items()}
    if isinstance(config, SFTConfig):
        return Placement(cluster, machine, numbers, trained)
    own = _own_devices(config, cluster)
    if own:
        _require_devices("actor_infer", own, machine)
    served = _served(config, own, numbers, cluster)
    return Placement(cluster, machine, numbers, trained, served, _unused_keys(config, own, machine))


def described(config: AnyConfig) -> Machine:
    """The smallest machine on which a config without contradictions can be placed: it has the devices that the config names,
    and a launcher if the config can't run without."""
    roles = _training_roles(config)
    devices = _devices_of(roles, _HERE)
    last = max(device for named in devices.values() for device in named)
    num_launched = 1
    if config.cluster.name == "launched" or any(_unsharded(roles, devices)):
        num_named = len({device for named in devices.values() for device in named})
        num_launched = num_named if next(iter(roles.values())).device_mapping else max(2, last + 1)
    if isinstance(config, AgenticConfig):
        last = max([last, *(config.actor_infer.device_mapping or ())])
    return Machine((Node(max(last + 1, num_launched), "cuda"),), num_launched)


def contradictions(config: AnyConfig) -> Iterator[Problem]:
    """What is wrong with a config about devices and processes, whatever the machine."""
    if config.cluster.name == "ray":
        message = "ray isn't in this version; take process for the devices of one machine"
        yield Problem.at("cluster.name", f"{message}, or launched for processes that torchrun or accelerate started there")
        return
    roles = _training_roles(config)
    devices = _devices_of(roles, _HERE)
    numbers = {device for named in devices.values() for device in named}
    if config.cluster.name == "local" and (reason := _why_apart(config, len(numbers))):
        yield Problem.at("cluster.name", f"local can't hold this run: {reason}; leave cluster.name out (auto takes process)")
    elif config.cluster.name == "launched":
        yield from _unlaunchable(config, roles, numbers)
    for role, message in _unsharded(roles, devices):
        main = next(iter(roles.values()))
        is_named = bool(main.device_mapping or roles[role].device_mapping)
        if is_named or not _may_be_launched(config):
            yield Problem.at(_key(role), message)


def follows(config: AnyConfig, key: str) -> bool:
    """Whether the placement of the config depends on a key about devices. True for a config with contradictions."""
    if any(contradictions(config)):
        return True
    return key not in place(config, described(config)).unused_keys


def _training_roles(config: AnyConfig) -> dict[str, PlacedModel]:
    """The roles with ranks, by name. The first one's devices are also those of roles that name none."""
    if isinstance(config, SFTConfig):
        return {"sft": config}
    roles: dict[str, PlacedModel] = {"actor_train": config.actor_train}
    if config.needs_reference and not config.is_reference_in_policy:
        roles["reference"] = config.reference
    if config.needs_critic:
        roles["critic"] = config.critic
    return roles


def _devices_of(roles: Mapping[str, PlacedModel], default: tuple[int, ...]) -> _Devices:
    """The devices of each role. `default` are those of the first role if it names none."""
    main = next(iter(roles.values()))
    shared = main.device_mapping or default
    return {name: tuple(role.device_mapping or shared) for name, role in roles.items()}


def _why_apart(config: AnyConfig, num_devices: int) -> str:
    """Why training needs processes of its own; empty if it doesn't."""
    if config.plays_ahead:
        return "async_generation_ratio above 0 trains beside the rollouts"
    if isinstance(config, AgenticConfig) and _is_policy_sharded(config):
        name = config.actor_train.strategy_args.strategy_name
        return f"{name} shards the policy, which a server in its process couldn't read"
    if num_devices > 1:
        return f"the roles have {counted(num_devices, 'device')}"
    return ""


def _may_be_launched(config: AnyConfig) -> bool:
    is_allowed = config.cluster.name in ("auto", "launched")
    return is_allowed and not config.plays_ahead and _num_servers(config) <= 1


def _unlaunchable(config: AnyConfig, roles: Mapping[str, PlacedModel], numbers: set[int]) -> Iterator[Problem]:
    """Why `cluster.name: launched` contradicts the other keys."""
    main = next(iter(roles.values()))
    if config.plays_ahead:
        message = "launched trains in the process that plays, so async_generation_ratio must be 0"
        yield Problem.at("cluster.name", f"{message}; leave cluster.name out to train in separate processes")
    if main.device_mapping and len(numbers) == 1:
        message = "launched can't hold this run: the roles have 1 device, and a launcher starts a process for each of several"
        yield Problem.at("cluster.name", f"{message}; leave cluster.name out (auto takes local)")
    if _num_servers(config) > 1:
        message = f"{_num_servers(config)} servers in their own processes need a run without a launcher"
        yield Problem.at("actor_infer.device_mapping", f"{message}; name one device, or leave cluster.name: launched out")


def _unsharded(roles: Mapping[str, PlacedModel], devices: _Devices) -> Iterator[tuple[str, str]]:
    """`(role, message)` for each role whose strategy shards it over all processes, and which isn't on all of them."""
    num_processes = len({device for named in devices.values() for device in named})
    for name, role in roles.items():
        size = len(devices[name])
        if role.strategy_args.is_sharded and size < num_processes:
            strategy = role.strategy_args.strategy_name
            message = f"{strategy} shards over all {num_processes} processes of a run, and {name} is on {size} of them"
            yield name, f"{message}; give it the device_mapping of all, or use torch_train"


def _cluster(config: AnyConfig, num_devices: int, machine: Machine, is_ahead: bool) -> ClusterName:
    """The kind of processes that train. Raises ConfigError if `cluster.name` asks for another kind than the launcher's."""
    is_apart = is_ahead or _is_policy_sharded(config) or num_devices > 1
    alone: ClusterName = "process" if is_apart else "local"
    fitting: ClusterName = "launched" if machine.num_launched > 1 else alone
    named = config.cluster.name
    if named in ("auto", fitting):
        return fitting
    if named == "process" and fitting == "local":
        return "process"
    reason = "a launcher started this process, one of several"
    if named == "launched":
        reason = "no launcher started this process (torchrun, accelerate)"
    raise ConfigError(f"cluster.name: {named} can't hold this run: {reason}; leave cluster.name out (auto takes {fitting})")


def _require_launchable(
    config: AnyConfig, roles: Mapping[str, PlacedModel], num_devices: int, machine: Machine, is_ahead: bool
) -> None:
    """Raises ConfigError if the launcher's processes aren't one for each device, or can't run the config."""
    if num_devices != machine.num_launched:
        launched = [*range(machine.num_launched)]
        keys = [_key(name) for name, role in roles.items() if role.device_mapping not in (None, launched)]
        raise ConfigError(
            f"the roles have {counted(num_devices, 'device')} with {', '.join(keys)}, and the launcher started "
            f"{counted(machine.num_launched, 'process')}; start one process for each device, or leave device_mapping out"
        )
    if is_ahead:
        raise ConfigError(
            "a launcher started this run, whose processes train in the one that plays, so async_generation_ratio must be 0; "
            "start the run without a launcher to train in separate processes"
        )
    if _num_servers(config) > 1:
        raise ConfigError(
            f"actor_infer.device_mapping names devices of {_num_servers(config)} servers, and a launcher started this run: "
            "servers in their own processes need a run without one; name one device, or start the run without a launcher"
        )


def _require_devices(role: str, devices: Sequence[int], machine: Machine) -> None:
    """Raises ConfigError if the `device_mapping` of a role, or the number of launched processes, asks for a missing device."""
    last, num_devices = max(devices), machine.num_devices
    if last < num_devices:
        return
    reason = f"{_key(role)} names device {last}"
    fewer = "name others"
    if machine.num_launched > 1 and [*devices] == [*range(machine.num_launched)]:
        reason = f"the launcher started {machine.num_launched} processes for as many devices"
        fewer = f"start {num_devices} (--num_processes)"
    if machine.accelerator:
        raise ConfigError(f"{reason}, and this machine has {num_devices} CUDA devices (0 to {num_devices - 1}): {fewer}")
    raise ConfigError(
        f"{reason}, and this machine has {counted(num_devices, 'slot')} (without accelerators a device is a slot of the CPU, "
        f"one for each core): {fewer}, or set num_gpus_per_node: {last + 1} for more slots than cores"
    )


def _key(role: str) -> str:
    return "device_mapping" if role == "sft" else f"{role}.device_mapping"


def _is_policy_sharded(config: AnyConfig) -> bool:
    return isinstance(config, AgenticConfig) and config.actor_train.strategy_args.is_sharded


def _num_servers(config: AnyConfig) -> int:
    return 0 if isinstance(config, SFTConfig) else config.actor_infer.data_parallel_size


def _layout(role: PlacedModel, num_devices: int) -> dict[str, int]:
    """The role's size along each axis, without the axes that model parallelism doesn't use."""
    num_copies = max(num_devices // role.model_parallel_size, 1)
    axes = {"tp": role.tensor_parallel_size, "pp": role.pipeline_parallel_size}
    return {"dp": num_copies, **{axis: size for axis, size in axes.items() if size > 1}}


def _trained(role: PlacedModel, devices: tuple[int, ...], numbers: tuple[int, ...]) -> RolePlacement:
    """A rank on each device, in the device's process."""
    ranks = tuple((device,) for device in devices)
    processes = tuple(numbers.index(device) for device in devices)
    return RolePlacement(ranks, processes, _layout(role, len(devices)))


def _own_devices(config: AgenticConfig, cluster: ClusterName) -> tuple[int, ...]:
    """The devices of the inference servers; empty if the only server is on the first training device. A server in the
    trainer's process can't leave the trainer's device, since it may read the trainer's weights."""
    named = tuple(config.actor_infer.device_mapping or ())
    return named if cluster != "local" or len(named) > 1 else ()


def _served(
    config: AgenticConfig, own: tuple[int, ...], numbers: tuple[int, ...], cluster: ClusterName
) -> dict[str, RolePlacement]:
    """The inference servers, and the reward role's model, which is in the run's process."""
    here = BESIDE_TRAINERS if cluster == "process" else 0
    size = config.actor_infer.model_parallel_size
    ranks = tuple(own[first : first + size] for first in range(0, len(own), size)) or (numbers[:1],)
    processes: tuple[int, ...] = (here,)
    if len(ranks) > 1:
        processes = tuple(range(len(numbers), len(numbers) + len(ranks)))
    served = {"actor_infer": RolePlacement(ranks, processes, _layout(config.actor_infer, len(own)))}
    if config.needs_reward_role:
        is_with_server = bool(own) and cluster != "local"
        served["reward"] = RolePlacement((own[:1] if is_with_server else numbers[:1],), (here,))
    return served


def _unused_keys(config: AgenticConfig, own: tuple[int, ...], machine: Machine) -> frozenset[str]:
    names_devices = any(role.device_mapping for role in _training_roles(config).values())
    unused: set[str] = set()
    if not own:
        unused.add("actor_infer.device_mapping")
    if not (names_devices or own or machine.num_launched > 1):
        unused.add("num_gpus_per_node")
    return frozenset(unused)
