"""The whole loop on a model of 20,000 parameters: what it writes, and that options reach it."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from small_runs import LETTERS, broken_model, folder_of_run as run, measured, small_config, training
from transformers import AutoModelForCausalLM, AutoTokenizer

from turnwise.agents.env_agent import EnvAgent
from turnwise.algorithms.score_estimator import GRPO
from turnwise.assemble.agentic import build_agentic
from turnwise.assemble.rollouts import open_served_policy
from turnwise.assemble.run import start_run
from turnwise.assemble.saved import evaluate_model
from turnwise.batching.pack import pack
from turnwise.batching.plan import denominators
from turnwise.batching.samples import build_samples
from turnwise.errors import ConfigError, NotAvailableError
from turnwise.examine.examined import examine
from turnwise.models.load import load_model
from turnwise.rollout.journal import read_journal
from turnwise.tracking.jsonl import read_metrics
from turnwise.training.torch_strategy import TorchStrategy
from turnwise.types import Metric


def make_config(tiny_model, tmp_path, **changes):
    own = {
        "max_steps": 2,
        "eval_steps": 2,
        "val_batch_size": 6,
        "track_with": ["tensorboard"],
        "actor_train": training(),
        "val_env_manager": {"num_env_groups": 6},
        "custom_envs": {"Letters": {**LETTERS, "max_steps": 3}},
    }
    return small_config(tiny_model, tmp_path, **own | changes)


@pytest.fixture(scope="module")
def letters(tiny_model, tmp_path_factory):
    return run(make_config(tiny_model, tmp_path_factory.mktemp("runs")))


def test_a_run_writes_what_it_promises(letters):
    rows = read_metrics(letters.metrics)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["actor/backward_steps"] == 2 for row in rows[:2])
    assert "val/env/Letters/success" in rows[0] and "val/env/Letters/success" not in rows[1]
    assert set(rows[2]) >= {"val/score/mean", "val/env/Letters/success"}
    for name in (
        "rollout/score/mean",
        "actor/pg_loss",
        "actor_train/grad_norm",
        "actor/lr",
        "critic/score/mean",
        "system/tps",
    ):
        assert all(name in row for row in rows[:2]), name
    assert (
        json.loads((letters.path / "environment.json").read_text())["packages"]["torch"] == torch.__version__
    )
    assert "exp_name: letters" in letters.config.read_text()
    assert list(letters.tensorboard.iterdir())
    assert [log for log in letters.path.glob("*.log") if "best trajectory" in log.read_text()]
    state = json.loads((letters.path / "checkpoints" / "checkpoint-2" / "pipeline.json").read_text())
    assert state["step"] == 2 and state["rollouts"]["next_index"] == 4


def test_checkpoints_are_model_folders_that_transformers_loads(letters):
    checkpoints = sorted((letters.path / "checkpoints").iterdir())
    assert [c.name for c in checkpoints] == ["checkpoint-1", "checkpoint-2"]
    first, last = (AutoModelForCausalLM.from_pretrained(c) for c in checkpoints)
    assert AutoTokenizer.from_pretrained(checkpoints[-1]).chat_template
    assert any(not torch.equal(a, b) for a, b in zip(first.parameters(), last.parameters(), strict=True))


def test_the_saved_model_scores_what_training_measured(letters, tiny_model, tmp_path):
    checkpoint = letters.path / "checkpoints" / "checkpoint-2"
    evaluation = evaluate_model(examine(make_config(tiny_model, tmp_path)), str(checkpoint))
    assert evaluation.overall.mean_score == pytest.approx(
        read_metrics(letters.metrics)[-1]["val/score/mean"], abs=1e-12
    )
    assert evaluation.overall.num_episodes == 6 and evaluation.num_failed == 0


def test_rollouts_are_those_that_were_trained_on(letters):
    rows = read_journal(letters.rollouts)
    assert [step for step, _ in rows] == [0] * 8 + [1] * 8
    for step, trajectory in rows:
        [sample] = build_samples(trajectory)
        assert {run.version for turn in trajectory.turns for run in turn.versions} == {step}
        assert sample.num_trained == sum(len(turn.response_ids) for turn in trajectory.turns) > 0
        assert (sample.rollout_logprobs[sample.response_mask] < 0).all()
    assert all(row["actor/train_infer_diff_token_max"] < 1e-4 for row in measured(letters)[:2])


@pytest.mark.parametrize(
    ("sampler", "least", "most"),
    [
        ({"strategy_args": {"strategy_name": "hf"}}, 0.0, 1e-6),
        ({"model_args": {"dtype": "bf16"}}, 1e-5, 0.05),
    ],
    ids=["hf", "bf16"],
)
def test_sampler_and_trainer_agree_as_far_as_their_dtypes_do(tiny_model, tmp_path, sampler, least, most):
    rows = measured(run(make_config(tiny_model, tmp_path, eval_steps=0, actor_infer=sampler)))
    assert all(least <= row["actor/train_infer_diff_token_mean"] < most for row in rows)
    assert least > 0 or all(row["actor/train_infer_diff_token_max"] < 1e-4 for row in rows)


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"trace": {"backend": "mlflow"}}, NotAvailableError, "trace.backend mlflow"),
        ({"adv_estimator": "nowhere:Class"}, ConfigError, "nowhere"),
    ],
)
def test_what_cannot_run_is_refused_before_a_model_is_loaded(tmp_path, changes, error, said):
    config = make_config(broken_model(tmp_path / "no_model"), tmp_path, **changes)
    with pytest.raises(error, match=said):
        build_agentic(examine(config), start_run(config))


def test_between_updates_the_server_stays_on_its_own_policy(tiny_model, tmp_path):
    rare = training(1e-2, 8) | {"model_update_frequency": 2}
    folder = run(make_config(tiny_model, tmp_path, max_steps=3, eval_steps=0, actor_train=rare))
    assert [row["actor/staleness_mean"] for row in measured(folder)] == [0.0, 1.0, 0.0]
    start = TorchStrategy(load_model(tiny_model))
    for step, trajectory in read_journal(folder.rollouts):
        if step < 2:
            [sample] = build_samples(trajectory)
            [out] = start.forward([pack([sample], denominators([sample], 256))], frozenset({"logprobs"}))
            np.testing.assert_allclose(out["logprobs"], sample.rollout_logprobs, atol=1e-4)


def test_critic_warmup_without_a_critic_changes_nothing(letters, tiny_model, tmp_path):
    assert measured(run(make_config(tiny_model, tmp_path, critic_warmup=2))) == measured(letters)


class MyGRPO(GRPO):
    def credit(self, groups):
        return [*super().credit(groups), Metric("mine/credit", 1.0)]


class MyAgent(EnvAgent):
    async def run(self, *args):
        [trajectory] = await super().run(*args)
        trajectory.metrics["mine"] = 2.0
        return [trajectory]


def test_own_estimators_and_agents_come_as_module_and_class(tiny_model, tmp_path):
    envs = {"Letters": LETTERS | {"agent_name": f"{__name__}:MyAgent"}}
    own = {"adv_estimator": f"{__name__}:MyGRPO", "custom_envs": envs}
    [row] = measured(run(make_config(tiny_model, tmp_path, max_steps=1, eval_steps=0, **own)))
    assert row["mine/credit"] == 1.0 and row["env/Letters/mine"] == 2.0


def test_end_tokens_of_the_generation_config_end_a_turn(tiny_model, tmp_path):
    policy = open_served_policy(examine(make_config(tiny_model, tmp_path)))
    policy.close()
    assert set(policy.template.stop_token_ids) >= set(policy.info.stop_token_ids)
    assert len(policy.info.stop_token_ids) == 2
