"""What lending pays: replicas on training's devices that make room for it, against devices of its own.

    python benchmarks/lending.py [--speeds TOKENS_A_SECOND …] [--conversations N]

Scheduler, buffer, agents, conversations, router and `LentReplicas` are those of a run; engines and the
trainer are simulated, in virtual time. There are four devices. *Disjoint*: two train, two sample. *Lent*: two
train, and all four sample; the two replicas on training's devices let their responses end (`finish`) or hand
them to the others (`abort_continue`), move their memory away while training computes, and come back with the
new weights.

For each speed of the trainer (tokens a second on one device): seconds of a step, tokens trained a second, and
the share of the time in which each device neither trains nor has a request to answer (`idle`), as a run
measures it (`system/device_idle/N`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from machine import describe_machine
from reach import turns_of
from scale import LakeEnv
from simulated_engine import EngineTimes, SimulatedEngine
from toy import parse_arguments
from virtual_time import VirtualTimeLoop

from turnwise.agents.env_agent import EnvAgent, EnvAgentSettings
from turnwise.agents.env_session import CallSettings
from turnwise.chat.contexts import TokenContexts
from turnwise.chat.template import ChatTemplate
from turnwise.inference.server_manager import LLMServerManager
from turnwise.pipelines.lent_replicas import LentReplicas
from turnwise.protocols import OnWeightUpdate
from turnwise.rollout.scheduler import RolloutScheduler
from turnwise.rollout.settings import SchedulerSettings
from turnwise.rollout.tasks import SeededTasks
from turnwise.runtime.device_use import DeviceUse
from turnwise.testing.fakes import byte_tokenizer
from turnwise.types import SamplingParams

NUM_DEVICES = 4
TRAINED_ON = (0, 1)
SPEEDS = (4_000.0, 8_000.0, 16_000.0)
CONVERSATIONS = 1024
GROUP_SIZE = 8
NUM_STEPS = 5
MOVE_S = 1.0
"""Seconds in which a device's memory changes hands, in each direction."""
TIMES = EngineTimes()
LAYOUTS: dict[str, tuple[tuple[int, ...], OnWeightUpdate]] = {
    "disjoint": ((2, 3), "finish"),
    "lent, finish": ((0, 1, 2, 3), "finish"),
    "lent, abort_continue": ((0, 1, 2, 3), "abort_continue"),
}
"""The devices that sample, each with a replica, and what becomes of the responses of replicas that leave."""


class LendableEngine(SimulatedEngine):
    """A simulated engine that can be suspended and sleep."""

    async def suspend(self, suspension: str = "finish") -> None:
        """Ends when its requests have ended; the router sends no more. `abort` ends them at once."""
        if suspension == "abort":
            self.interrupt()
        while self.is_busy:
            await asyncio.sleep(TIMES.step_s)

    async def sleep(self, kinds: Sequence[str]) -> None:
        """Its memory leaves while that of others does: `Run.train` waits for all of them."""

    async def wake(self, kinds: Sequence[str]) -> None: ...


@dataclass
class Run:
    """A run in one of the `LAYOUTS`."""

    layout: str
    trained_tokens_s: float
    """The speed of one training device."""
    conversations: int

    def __post_init__(self) -> None:
        self.loop = VirtualTimeLoop()
        template = ChatTemplate(byte_tokenizer())
        answer = template.respond("<answer>Right</answer>")
        devices, on_weight_update = LAYOUTS[self.layout]
        interrupted: dict[int | None, float] = {}
        self.engines = {device: LendableEngine(answer, TIMES, interrupted) for device in devices}
        lent: list[Any] = [self.engines[device] for device in TRAINED_ON if device in self.engines]
        servers: list[Any] = list(self.engines.values())
        self.use = DeviceUse(range(NUM_DEVICES), self.loop.time)
        device_of = {engine: device for device, engine in self.engines.items()}
        self.servers = LLMServerManager(servers)
        self.servers.use_devices = lambda server: self.use.using([device_of[server]])
        self.lent = LentReplicas(self.servers, lambda server: server in lent, on_weight_update, self.admit)
        self.has_lent = bool(lent)
        settings = EnvAgentSettings("Lake", max_tokens_per_step=64, calls=CallSettings(timeout_s=None))
        agent = EnvAgent(lambda _: LakeEnv(), settings)
        num_groups = self.conversations // GROUP_SIZE
        self.scheduler = RolloutScheduler(
            run_async=self.loop.run_until_complete,
            tasks=SeededTasks(0, "train", ("Lake",), (1,)),
            agents=lambda task: agent,
            contexts=partial(TokenContexts, template, self.servers, 4096),
            sampling=SamplingParams(max_new_tokens=64),
            settings=SchedulerSettings(GROUP_SIZE, num_groups, async_generation_ratio=1),
        )
        self.num_tokens = 0.0

    async def admit(self, server: Any) -> None:
        self.servers.join(server)

    def measure(self) -> dict[str, Any]:
        batch_size = self.conversations // 4 // GROUP_SIZE * GROUP_SIZE
        for version in range(NUM_STEPS):
            batch = self.scheduler.get_batch(batch_size)
            num_tokens = len(turns_of(batch)) * TIMES.mean_tokens
            self.loop.run_until_complete(self.train(num_tokens, version + 1))
        elapsed_s = self.loop.time()
        idle = [*self.use.idle_shares().values()]
        self.scheduler.close()
        self.loop.close()
        return {
            "step_s": round(elapsed_s / NUM_STEPS, 2),
            "trained_tokens_a_second": round(self.num_tokens / elapsed_s),
            "idle": [round(share, 3) for share in idle],
            "idle_mean": round(sum(idle) / NUM_DEVICES, 3),
        }

    async def train(self, num_tokens: float, version: int) -> None:
        if self.has_lent:
            await self.lent.leave(["kv_cache"])
            await asyncio.sleep(MOVE_S)
        seconds = num_tokens / (self.trained_tokens_s * len(TRAINED_ON))
        with self.use.using(TRAINED_ON):
            await asyncio.sleep(seconds)
        self.num_tokens += num_tokens
        for engine in self.engines.values():
            engine.version = version
        if self.has_lent:
            await asyncio.sleep(MOVE_S)
            await self.lent.come_back(["kv_cache"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--speeds", type=float, nargs="+", default=SPEEDS, help="of the trainer")
    parser.add_argument("--conversations", type=int, default=CONVERSATIONS, help="at once")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "lending.json")
    options = parse_arguments(parser, speeds=[12_000.0], conversations=64)
    rows: dict[str, dict[str, Any]] = {}
    for speed in options.speeds:
        of_speed = {layout: Run(layout, speed, options.conversations).measure() for layout in LAYOUTS}
        rows[f"{speed:g}"] = of_speed
        for layout, row in of_speed.items():
            print(f"{speed:7.0f} tokens/s  {layout:20}", json.dumps(row), flush=True)
    result = {
        "by_trained_tokens_a_second": rows,
        "conversations": options.conversations,
        "engine": {name: getattr(TIMES, name) for name in TIMES.__slots__},
        "move_s": MOVE_S,
        "machine": describe_machine(),
    }
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
