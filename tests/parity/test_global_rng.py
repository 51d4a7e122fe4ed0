"""Chance belongs to what it is for: neither validation, nor the order in which episodes end, nor somebody who
draws from the process's own generators changes a training run."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import torch

from turnwise.envs.frozen_lake.env import FrozenLakeEnv
from turnwise.types import derive_seed

VALIDATION = ("val_batch_size=8", "val_env_manager.num_env_groups=8")


class GamblingLake(FrozenLakeEnv):
    """Draws from every generator that the process shares."""

    def step(self, action: str) -> Any:
        random.random(), np.random.rand(), torch.rand(1)
        return super().step(action)


class UnevenLake(FrozenLakeEnv):
    """Answers after a time that has nothing to do with the order in which episodes began."""

    async def step(self, action: str) -> Any:  # type: ignore[override]
        await asyncio.sleep(derive_seed(self.position, action, *self.rows) % 10 / 1000)
        return super().step(action)


def without(run, prefix):
    """The metrics of the three training steps but for those with the prefix."""
    return [
        {name: value for name, value in row.items() if not name.startswith(prefix)} for row in run.metrics[:3]
    ]


def test_validating_more_often_changes_nothing(plain, lake_config, train):
    watched = train(lake_config("eval_steps=1", *VALIDATION))
    assert (
        all("val/score/mean" in row for row in watched.metrics) and "val/score/mean" not in plain.metrics[0]
    )
    assert without(watched, "val/") == without(plain, "val/")
    assert watched.rollouts == plain.rollouts


def test_the_generators_of_the_process_change_nothing(plain, lake_config, train):
    random.seed(7), np.random.seed(7)
    gambling = train(lake_config(f"custom_envs.FrozenLake.env_type={__name__}:GamblingLake"))
    assert gambling.metrics == plain.metrics and gambling.rollouts == plain.rollouts


def test_the_order_in_which_episodes_end_changes_nothing(plain, lake_config, train):
    """The engine batches other requests together, so what it computed rounds differently: the log-probs of
    the sampler, on which training doesn't rest."""
    uneven = train(lake_config(f"custom_envs.FrozenLake.env_type={__name__}:UnevenLake"))
    for row, expected in zip(uneven.rollouts, plain.rollouts, strict=True):
        assert [turn["response_ids"] for turn in row["turns"]] == [
            turn["response_ids"] for turn in expected["turns"]
        ]
        for turn, same in zip(row["turns"], expected["turns"], strict=True):
            np.testing.assert_allclose(turn["logprobs"], same["logprobs"], atol=1e-5)
    assert without(uneven, "actor/train_infer_") == without(plain, "actor/train_infer_")
    assert all(torch.equal(weight, plain.weights[name]) for name, weight in uneven.weights.items())
