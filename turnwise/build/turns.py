"""Which roles take turns for the memory of an accelerator."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial

from turnwise.build.rollouts import ServedPolicy
from turnwise.cluster.placement import Placement
from turnwise.config import AgenticConfig
from turnwise.pipelines.device_turns import DeviceTurns, Resident
from turnwise.pipelines.roles import ModelRole
from turnwise.protocols import MemoryKind
from turnwise.spec import STRATEGIES


def give_turns(
    config: AgenticConfig, placement: Placement, policy: ServedPolicy, roles: Mapping[str, ModelRole]
) -> Callable[[], Awaitable[None]] | None:
    """Lets the roles of a synchronous run take turns, and returns the turn of a weight transfer. None where none is shared:
    on a CPU, and in asynchronous runs, whose roles compute at the same time."""
    if not placement.accelerator or config.plays_ahead:
        return None
    residents: dict[str, Resident] = {}
    for name, role in roles.items():
        kinds: set[MemoryKind] = {"weights"}
        if STRATEGIES[config.roles[name].strategy_args.strategy_name].kind == "train":
            kinds.add("optimizer")
        if name == "actor_train" and not policy.servers.info().needs_weights:
            kinds.remove("weights")  # the server reads them
        offload, onload = (partial(role.workers.call, method) for method in ("offload", "onload"))
        residents[name] = Resident(frozenset(placement.roles[name].devices), frozenset(kinds), offload, onload)
    own = config.actor_infer.device_mapping if config.trains_apart or config.num_replicas > 1 else None
    residents["actor_infer"] = Resident(
        frozenset(own or placement.devices[:1]), policy.servers.info().sleeps, policy.servers.sleep, policy.servers.wake
    )
    turns = DeviceTurns(residents)

    def take_turn(role: str, kinds: Collection[MemoryKind] | None) -> None:
        policy.event_loop.run(turns.take(role, kinds))

    for role in roles.values():
        role.take_turn = take_turn
    policy.servers.take_turn = lambda: turns.take("actor_infer")
    return turns.transfer
