"""Whole runs don't depend on how samples are laid out in memory: in fp32 mean |Δ| ≤ 1e-6 and max |Δ| ≤ 1e-4
of log-probs and losses, and the very same tokens, over three steps of the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from small_runs import run_small

from turnwise.config import AgenticConfig
from turnwise.envs.parsing import parse_action
from turnwise.pipelines.agentic import AgenticPipeline
from turnwise.protocols import Algorithm, Env, OpenConversation
from turnwise.tracking.jsonl import read_metrics
from turnwise.types import CallOptions, FloatArray, Group, Metric, Sample, SamplingParams, Task, Trajectory

BASE = (
    "rollout_batch_size=16",
    "train_env_manager.num_env_groups=2",
    "{role}.training_args.per_device_train_batch_size=8",
    "{role}.use_dynamic_batching_in_train=false",
)
"""One packed micro-batch for each optimiser step of 8 samples."""
LAYOUTS = {
    "micro-batches of one": (
        "{role}.training_args.per_device_train_batch_size=1",
        "{role}.training_args.gradient_accumulation_steps=8",
    ),
    "dynamic micro-batches": (
        "{role}.use_dynamic_batching_in_train=true",
        "{role}.use_dynamic_batching_in_infer=true",
        "{role}.max_tokens_per_microbatch_in_train=96",
        "{role}.max_tokens_per_microbatch_in_infer=96",
    ),
    "padded": ("{role}.model_args.attn_implementation=sdpa",),
    "activations computed twice": ("{role}.model_args.disable_gradient_checkpointing=false",),
}
CASES = {
    "contexts and weights": (f"custom_envs.FrozenLake.agent_name={__name__}:FreshContextAgent",),
    "a critic": ("adv_estimator=gae", "critic.training_args.learning_rate=1e-3"),
}


def overrides(case: str, layout: Sequence[str] = ()) -> list[str]:
    """The overrides of one case, with its trained roles in the layout."""
    roles = ("actor_train", "critic") if case == "a critic" else ("actor_train",)
    return [*CASES[case], *(line.format(role=role) for line in (*BASE, *layout) for role in roles)]


class FreshContextAgent:
    """Shows each turn alone, in a context of its own, and cuts the episodes of odd siblings into two
    trajectories that share the outcome: trajectories of several samples, with weights that differ."""

    def __init__(self, make_env: Callable[[Task], Env], settings: Any) -> None:
        self._make_env = make_env
        self._settings = settings

    async def run(
        self, task: Task, sibling: int, open_conversation: OpenConversation, sampling: SamplingParams
    ) -> list[Trajectory]:
        env = self._make_env(task)
        observation, _ = env.reset(seed=task.seed)
        trajectory = Trajectory(task, sibling)
        is_over = False
        while not is_over and len(trajectory.turns) < self._settings.max_steps:
            conversation = open_conversation(sampling)
            prompt = {"role": "user", "content": observation}
            reply = await conversation.generate([prompt], CallOptions(self._settings.max_tokens_per_step))
            [turn] = conversation.turns
            turn.observation, turn.action = (
                observation,
                parse_action(reply["content"], self._settings.action_pattern),
            )
            observation, turn.reward, is_over, _, _ = env.step(turn.action or "")
            trajectory.turns.append(turn)
        turns = trajectory.turns
        if sibling % 2 == 0 or len(turns) < 2:
            return [trajectory]
        middle = len(turns) // 2
        return [Trajectory(task, sibling, part, weight=0.5) for part in (turns[:middle], turns[middle:])]


class Witness:
    """An algorithm that notes what the trainer computed for every batch before it was given credit."""

    def __init__(self, algorithm: Algorithm) -> None:
        self._algorithm = algorithm
        self.needs, self.loss, self.value_loss = algorithm.needs, algorithm.loss, algorithm.value_loss
        self.running = algorithm.running
        self.trajectories: list[Trajectory] = []

    def credit(self, groups: Sequence[Group]) -> list[Metric]:
        self.trajectories += [trajectory for group in groups for trajectory in group.trajectories]
        return self._algorithm.credit(groups)


@dataclass(slots=True)
class Measured:
    """The trajectories of a run as it trained on them, and its losses."""

    trajectories: list[Trajectory]
    losses: FloatArray

    @property
    def samples(self) -> list[Sample]:
        return [sample for trajectory in self.trajectories for sample in trajectory.samples]

    @property
    def tokens(self) -> list[list[int]]:
        return [sample.token_ids.tolist() for sample in self.samples]

    @property
    def logprobs(self) -> FloatArray:
        """The trainer's log-probs before each update."""
        return np.concatenate([sample.old_logprobs for sample in self.samples])

    @property
    def values(self) -> FloatArray:
        """The critic's values before each update; nothing without a critic."""
        return np.concatenate(
            [np.zeros(0) if sample.values is None else sample.values for sample in self.samples]
        )


def measure(config: AgenticConfig) -> Measured:
    def watch(pipeline: AgenticPipeline) -> None:
        pipeline.algorithm = Witness(pipeline.algorithm)

    pipeline = run_small(config, watch)
    rows = read_metrics(pipeline.folder.metrics)
    names = [name for name in rows[0] if name.endswith(("loss", "/grad_norm"))]
    return Measured(
        pipeline.algorithm.trajectories, np.array([[row[name] for name in names] for row in rows])
    )


@pytest.fixture(scope="module", params=CASES)
def case(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def packed(case, lake_config) -> Measured:
    return measure(lake_config(*overrides(case)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_is_the_same_in_every_layout(layout, case, packed, lake_config):
    other = measure(lake_config(*overrides(case, LAYOUTS[layout])))
    assert other.tokens == packed.tokens
    pairs = ((other.logprobs, packed.logprobs), (other.values, packed.values), (other.losses, packed.losses))
    for got, expected in pairs:
        difference = np.abs(got - expected)
        assert len(difference) == 0 or (difference.mean() <= 1e-6 and difference.max() <= 1e-4)


def test_the_runs_show_something(case, packed):
    """Losses of several steps that aren't 0, and what the case is named for."""
    assert len(packed.losses) == 3 and np.abs(packed.losses).min() > 1e-4
    weights = {trajectory.weight for trajectory in packed.trajectories}
    most_samples = max(len(trajectory.samples) for trajectory in packed.trajectories)
    assert (weights == {0.5, 1.0} and most_samples > 2) == (case == "contexts and weights")
    assert (len(packed.values) > 0) == (case == "a critic")
