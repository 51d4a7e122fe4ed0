"""FrozenLake as `examples/frozen_lake/agentic.yaml` has it, played over any server: what contenders of a
benchmark share."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import yaml
from transformers import PreTrainedModel

from turnwise.agents.env_agent import EnvAgent, EnvAgentSettings
from turnwise.chat.contexts import TokenContexts
from turnwise.chat.template import ChatTemplate
from turnwise.envs.registry import make_env
from turnwise.models.load import load_tokenizer, stop_token_ids
from turnwise.protocols import InferenceServer
from turnwise.rollout.tasks import SeededTasks, sibling_sampling
from turnwise.types import SamplingParams, Split, Task, Trajectory

EXAMPLE = Path(__file__).parent.parent / "examples" / "frozen_lake" / "agentic.yaml"
TAG = "FrozenLake"


class Player:
    """The library's agent, template and environment, without scheduler or pipeline."""

    def __init__(
        self,
        model_folder: str,
        model: PreTrainedModel,
        *,
        max_length: int,
        partition: int,
        max_steps: int | None = None,
    ) -> None:
        env = yaml.safe_load(EXAMPLE.read_text())["custom_envs"][TAG]
        self._template = ChatTemplate(
            load_tokenizer(model_folder), eos_token_ids=stop_token_ids(model.generation_config)
        )
        self._settings = EnvAgentSettings(
            tag=TAG,
            max_steps=max_steps or env["max_steps"],
            max_tokens_per_step=env["max_tokens_per_step"],
            system_template=env["agent_system_template"],
            turn_template=env["agent_template"],
        )
        self._env = env
        self._max_length = max_length
        self._partition = partition
        self._num_plays = 0

    async def play(
        self,
        server: InferenceServer,
        indices: Sequence[int],
        group_size: int,
        *,
        seed: int,
        split: Split = "train",
    ) -> list[Trajectory]:
        """The episodes of these groups, sibling after sibling; all begin at once."""
        # Validation has each of its tasks in a slot of its own.
        partition = len(indices) if split == "val" else self._partition
        source = SeededTasks(run_seed=seed, split=split, tags=(TAG,), partition=(partition,))
        make = partial(make_env, self._env["env_type"], self._env["env_config"], split)
        agent = EnvAgent(lambda task: make(), self._settings)
        sampling = SamplingParams(self._settings.max_tokens_per_step)
        self._num_plays += 1

        async def play_one(task: Task, sibling: int) -> Trajectory:
            name = f"{self._num_plays}/{task.id}/{sibling}"
            contexts = TokenContexts(self._template, server, self._max_length, name)
            trajectories = await agent.run(task, sibling, contexts, sibling_sampling(sampling, task, sibling))
            await contexts.close()
            return trajectories[0]

        tasks = [source.task(index) for index in indices]
        return await asyncio.gather(
            *(play_one(task, sibling) for task in tasks for sibling in range(group_size))
        )
