"""Lets roles that share devices use their memory one after the other: all roles of a synchronous run, and in
an asynchronous one the replicas on the trainer's devices."""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial

from turnwise.cluster.server_process import ServerProcess
from turnwise.config import AgenticConfig
from turnwise.config.place import lent_replicas
from turnwise.inference.server_manager import LLMServerManager
from turnwise.pipelines.lent_replicas import LentReplicas
from turnwise.pipelines.model_role import ModelRole
from turnwise.pipelines.shared_devices import Resident, SharedDevices
from turnwise.protocols import InferenceServer, MemoryKind
from turnwise.runtime.device_use import DeviceUse
from turnwise.runtime.event_loop import WatchedRunner
from turnwise.runtime.placement import Placement
from turnwise.spec import STRATEGIES
from turnwise.types import Metric

FreeForTransfer = Callable[[], Awaitable[None]] | None
"""Frees device memory for a weight transfer; None if the roles don't share devices."""

_LENT = "replicas on the trainer's devices"


def share_devices(
    config: AgenticConfig,
    placement: Placement,
    servers: LLMServerManager,
    event_loop: WatchedRunner,
    roles: Mapping[str, ModelRole],
) -> FreeForTransfer:
    """Makes the roles of a synchronous run share device memory. Returns the function that frees memory for a
    weight transfer; None on a CPU, and in asynchronous runs, whose roles compute at the same time."""
    if not placement.accelerator or config.plays_ahead:
        return None
    residents = _training_residents(config, placement, servers, roles)
    devices = frozenset(placement.of("actor_infer").devices)
    residents["actor_infer"] = Resident(
        devices,
        servers.info().sleeps,
        servers.sleep,
        servers.wake,
    )
    shared = SharedDevices(residents)
    _claim_before_computing(shared, event_loop, roles)
    servers.claim_devices = lambda: shared.claim("actor_infer")
    return shared.free_for_transfer


def lend_devices(
    config: AgenticConfig,
    placement: Placement,
    servers: LLMServerManager,
    event_loop: WatchedRunner,
    roles: Mapping[str, ModelRole],
    admit: Callable[[InferenceServer], Awaitable[None]],
) -> Callable[[], list[Metric]]:
    """Makes the replicas of an asynchronous run that share devices with training leave them while training
    computes (`lent_replicas`). `admit` gives one the current weights, and then requests. Returns the function
    that gives the replicas their devices back, and what the step before has measured of the devices."""
    measured = _measure_use(config, placement, servers, roles)
    lent = lent_replicas(config, placement)
    if not lent:
        return measured
    names = {server.name for server in _processes(servers, lent)}
    replicas = LentReplicas(
        servers,
        lambda server: isinstance(server, ServerProcess) and server.name in names,
        config.on_weight_update,
        admit,
    )
    devices: set[int] = set()
    for replica in lent:
        devices.update(placement.of("actor_infer").ranks[replica])
    residents = _training_residents(config, placement, servers, roles)
    residents[_LENT] = Resident(
        frozenset(devices),
        servers.info().sleeps,
        replicas.leave,
        replicas.come_back,
    )
    shared = SharedDevices(residents)
    _claim_before_computing(shared, event_loop, roles)

    def give_devices_back() -> list[Metric]:
        event_loop.run(shared.claim(_LENT))
        return [*replicas.measured(), *measured()]

    return give_devices_back


def _measure_use(
    config: AgenticConfig,
    placement: Placement,
    servers: LLMServerManager,
    roles: Mapping[str, ModelRole],
) -> Callable[[], list[Metric]]:
    """The function that gives the idle share of each device since it was last called, of an asynchronous run
    whose replicas have processes; the first time nothing."""
    replicas = _processes(servers, range(len(servers.servers)))
    if not config.plays_ahead or not replicas:
        return list
    ranks = placement.of("actor_infer").ranks
    measured_devices = set(placement.of("actor_infer").devices)
    for role in roles.values():
        measured_devices.update(placement.roles[role.owner].devices)
    # What scores answers announces no work.
    if "reward" in placement.served:
        measured_devices -= set(placement.served["reward"].devices)
    use = DeviceUse(measured_devices)
    # One that is started again has the name of the one before.
    devices = {replica.name: ranks[number] for number, replica in enumerate(replicas)}

    def sampling(server: InferenceServer) -> AbstractContextManager[None]:
        assert isinstance(server, ServerProcess), "either all replicas have processes, or none has"
        return use.using(devices[server.name])

    servers.use_devices = sampling
    for role in roles.values():
        role.use_devices = lambda owner: use.using(placement.roles[owner].devices)
    has_begun = False

    def measured() -> list[Metric]:
        nonlocal has_begun
        shares = use.idle_shares()
        if not has_begun:
            has_begun = True
            return []
        return [Metric(f"system/device_idle/{device}", share) for device, share in shares.items()]

    return measured


def _processes(servers: LLMServerManager, replicas: Sequence[int]) -> list[ServerProcess]:
    candidates = [servers.servers[replica] for replica in replicas]
    return [server for server in candidates if isinstance(server, ServerProcess)]


def _training_residents(
    config: AgenticConfig,
    placement: Placement,
    servers: LLMServerManager,
    roles: Mapping[str, ModelRole],
) -> dict[str, Resident]:
    residents: dict[str, Resident] = {}
    for name, role in roles.items():
        if role.is_base:
            continue  # its workers are those of actor_train
        kinds: set[MemoryKind] = {"weights"}
        if STRATEGIES[config.roles[name].strategy_args.strategy_name].kind == "train":
            kinds.add("optimizer")
        if name == "actor_train" and not servers.info().needs_weights:
            kinds.remove("weights")  # the server reads these very tensors
        residents[name] = Resident(
            frozenset(placement.roles[name].devices),
            frozenset(kinds),
            offload=partial(role.workers.call, "offload"),
            onload=partial(role.workers.call, "onload"),
        )
    return residents


def _claim_before_computing(
    shared: SharedDevices, event_loop: WatchedRunner, roles: Mapping[str, ModelRole]
) -> None:
    def claim_devices(role: str, kinds: Collection[MemoryKind] | None) -> None:
        event_loop.run(shared.claim(role, kinds))

    for role in roles.values():
        role.claim_devices = claim_devices
