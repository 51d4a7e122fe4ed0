"""The loop with a critic: warm-up, its own plan and optimiser, its checkpoint, and the keys that reach it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from messages import says
from small_runs import LETTERS, folder_of_run as run, measured, small_config, training
from toy_model import toy_samples
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from turnwise.algorithms.token_estimator import PPO
from turnwise.cluster.local import LocalCluster
from turnwise.errors import ConfigError
from turnwise.models.load import save_model
from turnwise.models.value_head import load_value_model, value_head
from turnwise.pipelines.model_role import BatchPlan, ModelRole
from turnwise.runtime.info import LoadedModel, StrategyInfo


def make_config(tiny_model, tmp_path, **changes):
    own = {
        "max_steps": 2,
        "adv_estimator": "gae",
        "actor_train": training(),
        "critic": training(1e-2, 2),
        "train_env_manager": {"num_env_groups": 8, "group_size": 1},
        "custom_envs": {"Letters": {**LETTERS, "max_steps": 3}},
    }
    return small_config(tiny_model, tmp_path, **own | changes)


def tensors(model):
    return list(model.state_dict().values())


def are_equal(first, second):
    return all(torch.equal(a, b) for a, b in zip(tensors(first), tensors(second), strict=True))


@pytest.fixture(scope="module")
def warmed_up(tiny_model, tmp_path_factory):
    return run(make_config(tiny_model, tmp_path_factory.mktemp("runs"), critic_warmup=1, ppo_epochs=2))


def test_while_the_critic_warms_up_the_policy_stays_bit_by_bit(warmed_up, tiny_model):
    first, second = (warmed_up.path / "checkpoints" / f"checkpoint-{step}" for step in (1, 2))
    start = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert are_equal(start, AutoModelForCausalLM.from_pretrained(first))
    assert not are_equal(start, AutoModelForCausalLM.from_pretrained(second))
    critics = [AutoModelForTokenClassification.from_pretrained(place / "critic") for place in (first, second)]
    assert not are_equal(load_value_model(tiny_model), critics[0]) and not are_equal(*critics)
    rows = measured(warmed_up)
    assert not any(name in rows[0] for name in ("actor/pg_loss", "actor/lr", "actor_train/grad_norm"))
    assert all(name in rows[1] for name in ("actor/pg_loss", "actor/lr", "actor_train/grad_norm"))


def test_the_critic_has_its_own_plan_and_optimiser(warmed_up, tiny_model, tmp_path):
    rows = measured(warmed_up)
    assert [row["critic/backward_steps"] for row in rows] == [8, 8] and rows[1]["actor/backward_steps"] == 4
    assert (rows[1]["critic/lr"], rows[1]["actor/lr"]) == (1e-2, 1e-3)
    for name in (
        "loss",
        "value",
        "vpred",
        "error",
        "grad_norm",
        "values/mean",
        "returns/mean",
        "explained_variance",
    ):
        assert all(f"critic/{name}" in row for row in rows), name
    assert rows[0]["critic/values/max"] == 0.0 and rows[1]["critic/values/max"] != 0.0, (
        "a new head starts at 0"
    )
    config = make_config(tiny_model, tmp_path, critic_warmup=1)
    assert config.num_training_steps("actor_train") == 1 and config.num_training_steps("critic") == 2


def test_the_policy_s_schedule_ends_with_the_run(tiny_model, tmp_path):
    linear = training(batch_size=8, lr_scheduler_type="linear")
    keys = {"max_steps": 4, "save_steps": 0, "critic_warmup": 2, "actor_train": linear}
    rows = measured(run(make_config(tiny_model, tmp_path, **keys)))
    assert [row.get("actor/lr") for row in rows] == [None, None, 1e-3, 0.5e-3]


def test_the_critic_starts_from_reward_pretrain(tiny_model, tmp_path):
    start = load_value_model(tiny_model)
    torch.nn.init.constant_(value_head(start).bias, 7.0)
    save_model(start, None, tmp_path / "values")
    [row] = measured(
        run(make_config(tiny_model, tmp_path, max_steps=1, reward_pretrain=str(tmp_path / "values")))
    )
    assert row["critic/values/max"] == row["critic/values/min"] == pytest.approx(7.0)


class Mine(PPO):
    pass


class Untrained(PPO):
    def __init__(self, *args):
        super().__init__(*args)
        self.value_loss = None


def test_an_estimator_of_one_s_own_that_needs_values_gets_a_critic_and_must_train_it(tiny_model, tmp_path):
    [row] = measured(run(make_config(tiny_model, tmp_path, max_steps=1, adv_estimator=f"{__name__}:Mine")))
    assert row["critic/backward_steps"] == 4
    with pytest.raises(ConfigError, match=says("value_loss", "None", "critic")):
        run(make_config(tiny_model, tmp_path, max_steps=1, adv_estimator=f"{__name__}:Untrained"))


def test_values_before_and_after_tokens_come_from_one_pass_and_go_back_to_their_samples():
    class Worker:
        def forward(self, batches, outputs):
            assert outputs == {"values", "next_values"}
            return [
                {"values": batch.token_ids + 0.5, "next_values": batch.token_ids + 100.0} for batch in batches
            ]

        def info(self):
            return StrategyInfo(LoadedModel("none", 0, 0, "none", "none", "none", (0, 0)), "fp32")

    role = ModelRole(
        "critic", LocalCluster().spawn("critic", lambda _: Worker()), BatchPlan(4, 64, 0, max_tokens_infer=60)
    )
    samples = toy_samples(5)
    role.compute_values(samples)
    for sample in samples:
        np.testing.assert_array_equal(sample.values, sample.token_ids + 0.5)
        np.testing.assert_array_equal(sample.next_values, sample.token_ids + 100.0)
