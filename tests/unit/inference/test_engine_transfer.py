"""vLLM's own transfer of weights over a group: what becomes of a run if a member of the group ends."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from small_configs import config_of

from turnwise.assemble.weights import build_transfer
from turnwise.cluster.engine_senders import SendingEngines
from turnwise.cluster.weight_senders import SendingRanks
from turnwise.config.place import place
from turnwise.inference.server_manager import LLMServerManager
from turnwise.inference.vllm_server import VLLMServer
from turnwise.runtime.machine import Machine, Node
from turnwise.runtime.torch_group import Meeting
from turnwise.runtime.watchdog import Watchdog
from turnwise.testing.fakes import ScriptedServer
from turnwise.transfer.group import GroupWeights
from turnwise.transfer.manifest import WeightManifest
from turnwise.transfer.policy_transfer import PolicyTransfer

WEIGHTS = GroupWeights(WeightManifest({}), Meeting("127.0.0.1", 9), {0: 1, 1: 2}, 1, 3, 1.0)


class Engine:
    """vLLM's engine, which fails as vLLM says that its processes have failed."""

    def __init__(self, fails_in: str = "") -> None:
        self.fails_in = fails_in

    async def collective_rpc(self, method: str, **arguments: Any) -> None:
        if method == self.fails_in:
            raise RuntimeError(
                f"Call to collective_rpc method failed: {method}: a peer closed its connection"
            )

    async def start_weight_update(self) -> None: ...

    async def finish_weight_update(self) -> None: ...


def transfer_of(**keys: Any) -> PolicyTransfer:
    """The transfer of a run of this config and of a replica of vLLM, over vLLM's own transfer."""
    strategy = {"strategy_name": "vllm", "strategy_config": {"weight_transfer_config": {"backend": "gloo"}}}
    devices = {"actor_train.device_mapping": [0], "actor_infer.device_mapping": [1]}
    config = config_of(**{"actor_infer.strategy_args": strategy, **devices, **keys})
    placement = place(config, Machine((Node(2),)))
    servers = LLMServerManager([ScriptedServer([])])
    workers: Any = None
    return build_transfer(config, placement, SendingRanks(workers), servers, None, Watchdog())


class Server(VLLMServer):
    """Has an engine without vLLM."""

    def __init__(self, replica: int, engine: Engine) -> None:
        self.replica = replica
        self._engine = engine
        self._errors = SimpleNamespace(EngineDeadError=ArithmeticError)
        self._num_updates = 0


async def test_a_replica_whose_group_fails_leaves_and_the_run_goes_on() -> None:
    sound = Server(0, Engine())
    manager = LLMServerManager([sound, Server(1, Engine(fails_in="update_weights"))])
    await manager.receive(WEIGHTS)
    assert manager.servers == (sound,)


async def test_a_replica_that_has_not_joined_its_group_gets_the_weights_once_more() -> None:
    """It has loaded nothing."""
    servers = [Server(0, Engine()), Server(1, Engine(fails_in="init_weight_transfer_engine"))]
    manager = LLMServerManager(servers)
    asked: list[Any] = []

    async def send_again(server: Any, *, is_lost: bool) -> GroupWeights:
        asked.append(server)
        server._engine.fails_in = ""
        return WEIGHTS

    await manager.receive(WEIGHTS, send_again)
    assert manager.servers == tuple(servers) and asked == [servers[1]]
    servers[1]._engine = Dead()
    await manager.receive(WEIGHTS, send_again)
    assert manager.servers == (servers[0],) and len(asked) == 1


class Dead(Engine):
    """Fails as vLLM says that its engine has ended."""

    async def collective_rpc(self, method: str, **arguments: Any) -> None:
        raise ArithmeticError("EngineDeadError")


@pytest.mark.parametrize(("cluster", "interface"), [("ray", "eth7"), ("process", "")])
def test_the_interface_of_the_ranks_is_that_of_the_weights(cluster: str, interface: str) -> None:
    transfer = transfer_of(**{"cluster.name": cluster, "cluster.interface": "eth7"})
    assert isinstance(transfer.sender, SendingEngines) and transfer.sender.interface == interface


async def test_vllm_s_processes_are_told_the_interface() -> None:
    told: list[dict[str, Any]] = []

    class Told(Engine):
        async def collective_rpc(self, method: str, **arguments: Any) -> None:
            told.append(arguments["kwargs"])

    weights = replace(WEIGHTS, meeting=Meeting("10.0.0.1", 9, "eth7"))
    await Server(1, Told()).receive(weights)
    assert told[0]["init_info"]["interface"] == "eth7"


def test_servers_are_suspended_before_the_group_of_a_version_is_formed() -> None:
    """Requests may take minutes to end. A replica that ends meanwhile would be awaited by the others."""
    assert transfer_of(**{"cluster.name": "process"}).suspends_first
