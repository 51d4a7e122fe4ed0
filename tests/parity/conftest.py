"""A model that has learnt to walk over a lake, and pipeline runs with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranked_roles import make_role, make_roles, runner  # noqa: F401  # fixtures of several files
from safetensors.torch import load_file
from small_runs import measured, played, run_small
from toy_model import TINY

from turnwise.agents.env_agent import EnvAgentSettings
from turnwise.batching.pack import pack
from turnwise.batching.plan import denominators
from turnwise.chat.demonstration import encode_demonstration
from turnwise.chat.template import ChatTemplate
from turnwise.config import AgenticConfig, load_config
from turnwise.envs.frozen_lake.env import FrozenLakeEnv
from turnwise.envs.players import ErringPlayer, ExpertPlayer, Player
from turnwise.lifecycle.run_folder import RunFolder
from turnwise.models.load import load_model, load_tokenizer, save_model
from turnwise.models.make import make_model
from turnwise.play.demonstrations import demonstrations
from turnwise.play.tokenizer_text import message_text
from turnwise.training.cross_entropy import CrossEntropy
from turnwise.training.optimizer import OptimizerSettings
from turnwise.training.settings import StrategySettings
from turnwise.training.torch_strategy import TorchStrategy
from turnwise.types import Task

EXAMPLE = Path(__file__).parents[2] / "examples" / "frozen_lake" / "agentic.yaml"
SMALLER = (
    "seed=3",
    "max_steps=3",
    "eval_steps=0",
    "rollout_batch_size=32",
    "train_env_manager.num_env_groups=4",
    "actor_train.training_args.per_device_train_batch_size=16",
    "actor_train.training_args.warmup_steps=1",
    "actor_train.training_args.learning_rate=1e-3",
    "actor_infer.generating_args.temperature=0.7",
    "custom_envs.FrozenLake.env_config.size=3",
    "custom_envs.FrozenLake.max_steps=6",
    "custom_envs.FrozenLake.agent_system_template=Walk to the goal G.",
    "track_with=[]",
)
"""The FrozenLake example as three steps of two optimiser steps each, a second in all. The low temperature
leaves next to nothing to unlikely tokens, so that hardly a random number falls where a rounding decides
between two of them; with this seed none is nearer than 1e-4 to an edge."""

NUM_STEPS, BATCH = 60, 16


@pytest.fixture(scope="session")
def walker(tmp_path_factory) -> Path:
    """A Qwen3 of 30,000 parameters that imitates an erring player on 3×3 lakes: it writes actions of several
    tokens, nearly all in the right form, and some of its episodes reach the goal, so that siblings score
    differently."""
    folder = tmp_path_factory.mktemp("models") / "walker"
    make_lake = partial(
        FrozenLakeEnv, 3, is_slippery=False, observation="coordinates", env_instruction="", split="train"
    )
    settings = EnvAgentSettings(
        "FrozenLake", max_steps=6, system_template="Walk to the goal G.", turn_template="{observation}"
    )
    tasks = [Task(f"demonstration/{i}", "FrozenLake", "train", seed=i) for i in range(NUM_STEPS * BATCH)]
    rows = list(demonstrations(lambda task: make_lake(), settings, _erring_player, tasks))
    make_model("tiny", folder, message_text(rows), overrides=TINY)

    model, tokenizer = load_model(folder), load_tokenizer(folder)
    samples = [encode_demonstration(ChatTemplate(tokenizer), messages) for messages in rows]
    optimizer = OptimizerSettings(learning_rate=1e-2, scheduler="cosine", total_steps=NUM_STEPS)
    strategy = TorchStrategy(model, StrategySettings(optimizer))
    for start in range(0, len(samples), BATCH):
        batch = samples[start : start + BATCH]
        strategy.train_step(
            [pack(batch, denominators(batch, max_length=512))], CrossEntropy(), position=start // BATCH
        )
    save_model(model, tokenizer, folder)
    return folder


def _erring_player(env: FrozenLakeEnv, task: Task) -> Player:
    return ErringPlayer(ExpertPlayer(env), error_rate=0.5, seed=task.seed)


@dataclass(slots=True)
class Run:
    """What a run left behind, without the times in it."""

    folder: Path

    @property
    def metrics(self) -> list[dict[str, float]]:
        return measured(RunFolder(self.folder))

    @property
    def rollouts(self) -> list[dict[str, Any]]:
        return played(RunFolder(self.folder))

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The weights of the last checkpoint."""
        [folder] = self.folder.glob("checkpoints/checkpoint-*")
        return load_file(folder / "model.safetensors")


@pytest.fixture(scope="session")
def lake_config(walker, tmp_path_factory) -> Callable[..., AgenticConfig]:
    """`lake_config("KEY=VALUE", …)`: the smaller FrozenLake example from the walker, with these changes."""

    def configure(*overrides: str) -> AgenticConfig:
        places = (f"pretrain={walker}", f"output_dir={tmp_path_factory.mktemp('runs')}")
        config, _ = load_config(EXAMPLE, [*places, *SMALLER, *overrides])
        return config

    return configure


@pytest.fixture(scope="session")
def read_run() -> Callable[[Path], Run]:
    return Run


@pytest.fixture(scope="session")
def train() -> Callable[[AgenticConfig], Run]:
    """Runs the pipeline of a config in this process."""
    return lambda config: Run(run_small(config).folder.path)


@pytest.fixture(scope="session")
def plain(lake_config, train) -> Run:
    """A run of the config as it is."""
    return train(lake_config())
