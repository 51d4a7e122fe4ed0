"""Roles share a device whose memory is counted. It fails where optimiser state and KV are there together, and
where a role computes without the weights that it reads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from small_runs import run_small, small_config, training

from turnwise.assemble import agentic
from turnwise.assemble.shared_devices import share_devices
from turnwise.inference.embedded.engine import Engine
from turnwise.inference.embedded.server import EmbeddedServer
from turnwise.pipelines.shared_devices import Resident, SharedDevices
from turnwise.runtime.machine import Machine, Node
from turnwise.runtime.placement import Placement
from turnwise.training.torch_strategy import TorchStrategy

FAKE = Machine((Node(1, "fake"),))


class FakeDevice:
    """A ledger of what lies on one accelerator: `(role, kind)`."""

    def __init__(self) -> None:
        self.present: set[tuple[str, str]] = set()
        self.served = ""
        """The role whose weights the server samples from: its own, or the trainer's."""
        self.faults: list[str] = []
        """What was wrong. An error in the engine would end the server's loop, and the run would wait for
        it."""
        self.computed: dict[str, int] = {}
        self.crowds: set[frozenset[tuple[str, str]]] = set()
        """What was there while something computed."""

    def onload(self, role: str, kinds: Any) -> None:
        self.present |= {(role, kind) for kind in kinds}
        if {"optimizer", "kv_cache"} <= {kind for _, kind in self.present}:
            self.faults.append(f"out of memory: {sorted(self.present)}")

    def offload(self, role: str, kinds: Any) -> None:
        self.present -= {(role, kind) for kind in kinds}

    def compute(self, role: str, *needed: str, first: bool = False, model: str = "") -> None:
        """`role` computes with these kinds of its memory, which its first computation allocates, and with the
        weights of `model`, its own by default."""
        if first:
            self.onload(role, needed)
        missing = {(role, kind) for kind in needed} | {(model or role, "weights")}
        missing -= self.present
        if missing:
            self.faults.append(f"{role} computes without {sorted(missing)}")
        self.computed[role] = self.computed.get(role, 0) + 1
        self.crowds.add(frozenset(self.present))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """The one device of a run that takes itself for one on an accelerator."""
    device, stepped = FakeDevice(), set()

    def noted(kind: type, name: str, note: Callable[..., None]) -> None:
        real = getattr(kind, name)

        def call(self: Any, *args: Any, **options: Any) -> Any:
            note(self, *args)
            return real(self, *args, **options)

        monkeypatch.setattr(kind, name, call)

    def role(strategy: TorchStrategy) -> str:
        return strategy._ranks.context.role

    def step(strategy: TorchStrategy, *_: Any) -> None:
        device.compute(role(strategy), "optimizer", first=role(strategy) not in stepped)
        stepped.add(role(strategy))

    def decode(_: Engine) -> None:
        device.compute(
            "actor_infer", "kv_cache", first="actor_infer" not in device.computed, model=device.served
        )

    noted(TorchStrategy, "train_step", step)
    noted(TorchStrategy, "forward", lambda strategy, *_: device.compute(role(strategy)))
    noted(TorchStrategy, "offload", lambda strategy, kinds: device.offload(role(strategy), kinds))
    noted(TorchStrategy, "onload", lambda strategy, kinds: device.onload(role(strategy), kinds))
    noted(EmbeddedServer, "sleep", lambda _, kinds: device.offload("actor_infer", kinds))
    noted(EmbeddedServer, "wake", lambda _, kinds: device.onload("actor_infer", kinds))
    noted(Engine, "step", decode)

    def on_it(config: Any, placement: Any, servers: Any, event_loop: Any, roles: Any) -> Any:
        """The weights of all roles are on the device from the start. A reference in the policy has none of
        its own."""
        device.served = "actor_infer" if servers.info().needs_weights else "actor_train"
        for name in {device.served, *(name for name, role in roles.items() if not role.is_base)}:
            device.onload(name, ["weights"])
        return share_devices(config, replace(placement, machine=FAKE), servers, event_loop, roles)

    monkeypatch.setattr(agentic, "share_devices", on_it)
    return device


PPO = {"adv_estimator": "gae", "critic": training(1e-3, 8)}
KL = {"use_kl_loss": True, "kl_loss_coef": 0.01}
RUNS = {
    "one model": {},
    "a server of its own": {"actor_infer": {"model_args": {"dtype": "bf16"}}},
    "a critic and a reference": PPO | KL,
    "a policy kept for two steps": {"actor_train": {**training(1e-3, 8), "model_update_frequency": 2}},
    "adapters with their base as the reference": {
        "actor_train": training(1e-3, 8) | {"model_args": {"lora_rank": 2}}
    }
    | KL,
}


@pytest.mark.parametrize("changes", RUNS.values(), ids=RUNS)
def test_a_run_never_has_optimiser_state_and_kv_on_a_device(tiny_model, tmp_path, device, changes) -> None:
    own = {
        "max_steps": 4,
        "save_steps": 2,
        "eval_steps": 2,
        "val_batch_size": 2,
        "actor_train": training(1e-3, 8),
    }
    run_small(small_config(tiny_model, tmp_path / "runs", **own | changes))
    assert not device.faults
    trained = {"actor_train", "critic"} if "critic" in changes else {"actor_train"}
    assert trained < set(device.computed) and device.computed["actor_train"] >= 4
    kinds = [{kind for _, kind in crowd} for crowd in device.crowds]
    assert {"kv_cache"} in [found & {"kv_cache", "optimizer"} for found in kinds]
    assert {"optimizer"} in [found & {"kv_cache", "optimizer"} for found in kinds]
    for crowd in device.crowds:
        assert len({role for role, kind in crowd if kind == "optimizer"}) <= 1


def test_on_a_cpu_and_in_asynchronous_runs_nobody_is_offloaded(tiny_model, tmp_path) -> None:
    pipeline = run_small(small_config(tiny_model, tmp_path / "runs", max_steps=1, save_steps=0))
    assert pipeline.actor_train.claim_devices is None and pipeline.actor_infer.claim_devices is None
    ahead = small_config(tiny_model, tmp_path / "runs", async_generation_ratio=1)
    roles = {"actor_train": pipeline.actor_train}
    assert share_devices(ahead, Placement("process", FAKE), None, None, roles) is None  # type: ignore[arg-type]
    assert pipeline.actor_train.claim_devices is None


def resident(ledger: list[str], name: str, devices: set[int], kinds: set[Any]) -> Resident:
    async def offload(moved: list[Any]) -> None:
        ledger.append(f"-{name} {','.join(moved)}")

    async def onload(moved: list[Any]) -> None:
        ledger.append(f"+{name} {','.join(moved)}")

    return Resident(frozenset(devices), frozenset(kinds), offload, onload)


def test_memory_leaves_before_other_memory_comes_and_other_devices_are_left_alone() -> None:
    async def scenario() -> list[str]:
        ledger: list[str] = []
        shared = SharedDevices(
            {
                "actor_train": resident(ledger, "train", {0, 1}, {"weights", "optimizer"}),
                "critic": resident(ledger, "critic", {2}, {"weights", "optimizer"}),
                "actor_infer": resident(ledger, "infer", {1}, {"weights", "kv_cache"}),
            }
        )
        await shared.claim("actor_infer")
        await shared.claim("actor_infer")
        await shared.claim("actor_train", ["weights"])
        await shared.claim("actor_train")
        await shared.free_for_transfer()
        await asyncio.gather(*(shared.claim("actor_infer") for _ in range(3)))
        await shared.claim("nobody")
        return ledger

    assert asyncio.run(scenario()) == [
        "-train optimizer,weights",
        "-infer kv_cache,weights",
        "+train weights",
        "+train optimizer",
        "-train optimizer",
        "+infer weights",
        "-train weights",
        "+infer kv_cache",
    ]
