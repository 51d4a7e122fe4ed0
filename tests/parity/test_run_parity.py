"""Whole runs don't depend on how samples are laid out in memory: in fp32 mean |Δ| ≤ 1e-6 and max |Δ| ≤ 1e-4 of log-probs and
losses, and the very same tokens, over three steps of the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from turnwise.config import AgenticConfig
from turnwise.envs.parsing import parse_action
from turnwise.pipelines.build import build_agentic, start_run
from turnwise.protocols import Algorithm, Env, OpenConversation
from turnwise.types import FloatArray, Group, Metric, SamplingParams, Task, Trajectory

TRAIN = "actor_train.training_args"
MODEL = "actor_train.model_args"
BASE = (
    "rollout_batch_size=16",
    "train_env_manager.num_env_groups=2",
    f"{TRAIN}.per_device_train_batch_size=8",
    "actor_train.use_dynamic_batching_in_train=false",
)
"""One packed micro-batch for each optimiser step of 8 samples."""
LAYOUTS = {
    "micro-batches of one": (f"{TRAIN}.per_device_train_batch_size=1", f"{TRAIN}.gradient_accumulation_steps=8"),
    "dynamic micro-batches": (
        *(f"actor_train.use_dynamic_batching_in_{kind}=true" for kind in ("train", "infer")),
        *(f"actor_train.max_tokens_per_microbatch_in_{kind}=96" for kind in ("train", "infer")),
    ),
    "padded, sdpa": (f"{MODEL}.attn_implementation=sdpa",),
    "padded, eager": (f"{MODEL}.attn_implementation=eager",),
    "activations computed twice": (f"{MODEL}.disable_gradient_checkpointing=false",),
}
LOSSES = ("actor/pg_loss", "actor/total_loss", "actor_train/grad_norm")


class FreshContextAgent:
    """Shows each turn alone, in a context of its own, and lets the episodes of odd siblings count half: trajectories of
    several samples, with weights that differ."""

    def __init__(self, make_env: Callable[[Task], Env], settings: Any) -> None:
        self._make_env = make_env
        self._settings = settings

    async def run(
        self, task: Task, sibling: int, open_conversation: OpenConversation, sampling: SamplingParams
    ) -> list[Trajectory]:
        env = self._make_env(task)
        observation, _ = env.reset(seed=task.seed)
        trajectory = Trajectory(task, sibling, weight=0.5 if sibling % 2 else 1.0)
        is_over = False
        while not is_over and len(trajectory.turns) < self._settings.max_steps:
            conversation = open_conversation(sampling)
            prompt = {"role": "user", "content": observation}
            reply = await conversation.generate([prompt], max_new_tokens=self._settings.max_tokens_per_step)
            [turn] = conversation.turns
            turn.observation, turn.action = observation, parse_action(reply["content"], self._settings.action_pattern)
            observation, turn.reward, is_over, _, _ = env.step(turn.action or "")
            trajectory.turns.append(turn)
        return [trajectory]


class Witness:
    """An algorithm that notes the trainer's log-probs of every batch that it gives credit to."""

    def __init__(self, algorithm: Algorithm) -> None:
        self._algorithm = algorithm
        self.needs, self.loss, self.value_loss = algorithm.needs, algorithm.loss, algorithm.value_loss
        self.running = algorithm.running
        self.logprobs: list[FloatArray] = []
        self.weights: set[float] = set()
        self.most_samples = 0

    def credit(self, groups: Sequence[Group]) -> list[Metric]:
        self.logprobs += [sample.old_logprobs for group in groups for sample in group.samples]
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        self.weights |= {trajectory.weight for trajectory in trajectories}
        self.most_samples = max(self.most_samples, *(len(trajectory.samples) for trajectory in trajectories))
        return self._algorithm.credit(groups)


@dataclass(slots=True)
class Measured:
    """The tokens, the trainer's log-probs and the losses of a run."""

    tokens: list[list[int]]
    logprobs: FloatArray
    losses: FloatArray
    witness: Witness


def measure(config: AgenticConfig, read: Callable[..., Any]) -> Measured:
    folder = start_run(config)
    pipeline = build_agentic(config, folder)
    pipeline.algorithm = witness = Witness(pipeline.algorithm)
    try:
        pipeline.run()
    finally:
        pipeline.close()
    run = read(folder.path)
    tokens = [turn["prompt_ids"] + turn["response_ids"] for row in run.rollouts for turn in row["turns"]]
    losses = np.array([[row[name] for name in LOSSES] for row in run.metrics])
    return Measured(tokens, np.concatenate(witness.logprobs), losses, witness)


@pytest.fixture(scope="module", params=["env_agent", "FreshContextAgent"])
def agent(request) -> str:
    name = request.param if request.param == "env_agent" else f"{__name__}:{request.param}"
    return f"custom_envs.FrozenLake.agent_name={name}"


@pytest.fixture(scope="module")
def packed(agent, lake_config, read_run) -> Measured:
    return measure(lake_config(agent, *BASE), read_run)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_is_the_same_in_every_layout(layout, agent, packed, lake_config, read_run):
    other = measure(lake_config(agent, *BASE, *LAYOUTS[layout]), read_run)
    assert other.tokens == packed.tokens
    for name in ("logprobs", "losses"):
        difference = np.abs(getattr(other, name) - getattr(packed, name))
        assert difference.mean() <= 1e-6 and difference.max() <= 1e-4, name


def test_the_runs_show_something(agent, packed):
    """Several optimiser steps on advantages that aren't 0; contexts and weights where the agent makes them."""
    assert len(packed.losses) == 3 and np.abs(packed.losses).min() > 1e-4
    if agent.endswith("FreshContextAgent"):
        assert packed.witness.weights == {0.5, 1.0} and packed.witness.most_samples > 2
