"""What a config says about devices and processes, and what is wrong with that whatever the machine."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from turnwise.config.problems import Problem
from turnwise.config.schema.agentic import AgenticConfig
from turnwise.config.schema.model_args import PlacedModel
from turnwise.config.schema.sft import SFTConfig
from turnwise.errors import counted
from turnwise.runtime.machine import Machine

AnyConfig = AgenticConfig | SFTConfig


def ray_reason(config: AnyConfig, machine: Machine | None = None) -> str:
    """Why a run of this config uses Ray; empty if it doesn't. Without `machine`, what the config alone
    says."""
    cluster = config.cluster
    if cluster.name == "ray":
        return "cluster.name: ray"
    if cluster.name != "auto" or (machine and machine.num_launched > 1):
        return ""
    if cluster.address:
        return f"cluster.address: {cluster.address}"
    if machine and machine.ray_sign:
        return machine.ray_sign
    num_per_node = config.num_gpus_per_node
    last = max(Demand.of(config).named_devices, default=0)
    if num_per_node is not None and last >= num_per_node:
        return f"device {last} is beyond the {num_per_node} devices of a node (num_gpus_per_node)"
    return ""


def contradictions(config: AnyConfig) -> Iterator[Problem]:
    """What is wrong with a config about devices and processes, whatever the machine."""
    demand = Demand.of(config)
    # A launcher starts two processes at least.
    devices = demand.devices(num_launched=2 if demand.cluster == "launched" else 1)
    num_devices = len(union(devices))
    if demand.cluster == "local":
        yield from _local_problems(demand, num_devices)
    if demand.cluster == "launched":
        yield from _launched_problems(demand, num_devices)
    for problem in unsharded(demand, devices):
        role = problem.role
        is_named = demand.main.device_mapping or demand.roles[role].device_mapping
        # A launcher may yet put a role that names no devices on all processes.
        if is_named or not demand.may_be_launched:
            yield problem


@dataclass(frozen=True, slots=True)
class RoleProblem(Problem):
    role: str = ""


@dataclass(frozen=True, slots=True)
class Demand:
    """What a config says about devices and processes, in one form for both kinds of config."""

    cluster: str
    roles: Mapping[str, PlacedModel]
    """The roles with ranks. The devices of the first are also those of roles that name none."""
    server_devices: Sequence[int]
    """The devices that `actor_infer` names."""
    reward_devices: Sequence[int]
    """The devices that `reward` names, if it has a model; only a run under Ray follows them."""
    num_servers: int
    is_ahead: bool
    serves: bool
    """Whether a server reads the policy, in the trainer's process if it may."""

    @classmethod
    def of(cls, config: AnyConfig) -> "Demand":
        cluster = config.cluster.name
        if isinstance(config, SFTConfig):
            return cls(cluster, {"sft": config}, (), (), 0, is_ahead=False, serves=False)
        roles: dict[str, PlacedModel] = {"actor_train": config.actor_train}
        if config.needs_reference and not config.is_reference_in_policy:
            roles["reference"] = config.reference
        if config.needs_critic:
            roles["critic"] = config.critic
        server = config.actor_infer
        reward_devices: Sequence[int] = ()
        if config.needs_reward_role:
            reward_devices = config.reward.device_mapping or ()
        return cls(
            cluster,
            roles,
            server.device_mapping or (),
            reward_devices,
            server.data_parallel_size,
            is_ahead=config.plays_ahead,
            serves=True,
        )

    @property
    def main(self) -> PlacedModel:
        return next(iter(self.roles.values()))

    @property
    def named_devices(self) -> set[int]:
        named = {*self.server_devices, *self.reward_devices}
        for role in self.roles.values():
            named.update(role.device_mapping or ())
        return named

    @property
    def sharded_policy(self) -> str:
        """The policy's strategy if it shards the policy, so that a server in its process couldn't read it;
        else empty."""
        strategy = self.main.strategy_args
        return strategy.strategy_name if self.serves and strategy.is_sharded else ""

    @property
    def may_be_launched(self) -> bool:
        is_allowed = self.cluster in ("auto", "launched")
        return is_allowed and not self.is_ahead and self.num_servers <= 1

    def naming(self, role: str) -> str:
        """The role whose `device_mapping` decides where a role is."""
        return role if self.roles[role].device_mapping else next(iter(self.roles))

    def devices(self, num_launched: int) -> dict[str, tuple[int, ...]]:
        """The devices of each role. Without any named, they are one for each of a launcher's processes."""
        shared = self.main.device_mapping or range(num_launched)
        return {name: tuple(role.device_mapping or shared) for name, role in self.roles.items()}


def union(devices: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
    """The devices of all roles, in their order."""
    numbers: set[int] = set()
    for of_role in devices.values():
        numbers.update(of_role)
    return tuple(sorted(numbers))


def mapping_key(role: str) -> str:
    return "device_mapping" if role == "sft" else f"{role}.device_mapping"


def _local_problems(demand: Demand, num_devices: int) -> Iterator[Problem]:
    """Why `cluster.name: local` contradicts the other keys."""
    reason = ""
    if demand.is_ahead:
        reason = "async_generation_ratio above 0 trains beside the rollouts"
    elif demand.sharded_policy:
        reason = f"{demand.sharded_policy} shards the policy, which a server in its process couldn't read"
    elif num_devices > 1:
        reason = f"the roles have {counted(num_devices, 'device')}"
    if reason:
        message = f"local can't hold this run: {reason}"
        yield Problem.at("cluster.name", f"{message}; leave cluster.name out (auto takes process)")


def _launched_problems(demand: Demand, num_devices: int) -> Iterator[Problem]:
    """Why `cluster.name: launched` contradicts the other keys."""
    if demand.is_ahead:
        message = "launched trains in the process that plays, so async_generation_ratio must be 0"
        advice = "leave cluster.name out to train in separate processes"
        yield Problem.at("cluster.name", f"{message}; {advice}")
    if demand.main.device_mapping and num_devices == 1:
        message = (
            "launched can't hold this run: the roles have 1 device, and a launcher starts a process "
            "for each of several"
        )
        advice = "leave cluster.name out (auto takes local)"
        yield Problem.at("cluster.name", f"{message}; {advice}")
    if demand.num_servers > 1:
        message = f"{demand.num_servers} servers in their own processes need a run without a launcher"
        advice = "name one device, or leave cluster.name: launched out"
        yield Problem.at(mapping_key("actor_infer"), f"{message}; {advice}")


def unsharded(
    demand: Demand,
    devices: Mapping[str, Sequence[int]],
) -> Iterator[RoleProblem]:
    """Roles whose strategy shards them over all processes of the run, or over those of all its roles in a
    process, and which aren't on all of them."""
    num_processes = len(union(devices))
    for name, role in demand.roles.items():
        strategy = role.strategy_args
        size = len(devices[name])
        message = ""
        if strategy.spec.needs_all_processes and size < num_processes:
            message = (
                f"{strategy.strategy_name} shards over all {num_processes} processes of a run, "
                f"and {name} is on {size} of them; give it the device_mapping of all, or use torch_train"
            )
        sharing = _sharing(name, demand, devices)
        num_shared = len(union(sharing))
        if size < num_shared:
            message = (
                f"{strategy.strategy_name} shards over one set of devices in a process, and {name} is on "
                f"{size} of the {num_shared} of {' and '.join(sharing)}; give them the same device_mapping, "
                "or devices that don't overlap, or use fsdp2_train"
            )
        if message:
            yield RoleProblem(tuple(mapping_key(name).split(".")), message, name)


def _sharing(name: str, demand: Demand, devices: Mapping[str, Sequence[int]]) -> dict[str, Sequence[int]]:
    """The devices of a role and of all others of its strategy that have one of them, if its strategy needs
    them to be the same."""
    strategy = demand.roles[name].strategy_args
    sharing = {name: devices[name]}
    if strategy.spec.shares_all_devices:
        for other, role in demand.roles.items():
            is_alike = role.strategy_args.strategy_name == strategy.strategy_name
            if is_alike and not set(devices[other]).isdisjoint(devices[name]):
                sharing[other] = devices[other]
    return sharing


def undivided(
    demand: Demand,
    devices: Mapping[str, Sequence[int]],
) -> Iterator[RoleProblem]:
    """Roles whose devices, which `device_mapping` doesn't name, don't hold whole copies of the model. Those
    that it names are checked with the config."""
    for name, role in demand.roles.items():
        size = role.model_parallel_size
        if role.device_mapping is None and len(devices[name]) % size:
            message = (
                f"isn't set, so {name} has {counted(len(devices[name]), 'device')}, and a copy of its model "
                f"needs {size} (tensor × pipeline × context parallel): name a multiple of {size} devices, "
                "start as many processes by a launcher, or use smaller sizes"
            )
            yield RoleProblem(tuple(mapping_key(name).split(".")), message, name)
