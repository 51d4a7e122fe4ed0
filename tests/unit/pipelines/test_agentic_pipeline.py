"""The whole loop on a model of 20,000 parameters: what it writes, that it repeats itself, and that options reach it."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from small_runs import LETTERS, broken_model, folder_of_run as run, measured, played, small_config, training
from transformers import AutoModelForCausalLM, AutoTokenizer

from turnwise.batching.pack import pack
from turnwise.batching.plan import denominators
from turnwise.batching.samples import build_samples
from turnwise.build.agentic import build_agentic
from turnwise.build.rollouts import open_served_policy
from turnwise.build.run import start_run
from turnwise.build.saved import evaluate_model
from turnwise.errors import ConfigError, NotAvailableError, RolloutError
from turnwise.models.load import load_model
from turnwise.rollout.journal import read_journal
from turnwise.tracking.jsonl import read_metrics
from turnwise.training.torch_strategy import TorchStrategy


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
    for name in ("rollout/score/mean", "actor/pg_loss", "actor_train/grad_norm", "actor/lr", "critic/score/mean", "system/tps"):
        assert all(name in row for row in rows[:2]), name
    assert json.loads((letters.path / "environment.json").read_text())["packages"]["torch"] == torch.__version__
    assert "exp_name: letters" in letters.config.read_text()
    assert list(letters.tensorboard.iterdir())
    assert [log for log in letters.path.glob("*.log") if "best trajectory" in log.read_text()]


def test_checkpoints_are_model_folders_that_transformers_loads(letters):
    checkpoints = sorted((letters.path / "checkpoints").iterdir())
    assert [c.name for c in checkpoints] == ["checkpoint-1", "checkpoint-2"]
    first, last = (AutoModelForCausalLM.from_pretrained(c) for c in checkpoints)
    assert AutoTokenizer.from_pretrained(checkpoints[-1]).chat_template
    assert any(not torch.equal(a, b) for a, b in zip(first.parameters(), last.parameters(), strict=True))


def test_the_saved_model_scores_what_training_measured(letters, tiny_model, tmp_path):
    checkpoint = letters.path / "checkpoints" / "checkpoint-2"
    evaluation = evaluate_model(make_config(tiny_model, tmp_path), str(checkpoint))
    last = read_metrics(letters.metrics)[-1]
    assert evaluation.overall.mean_score == pytest.approx(last["val/score/mean"], abs=1e-12)
    assert evaluation.overall.num_episodes == 6 and evaluation.num_failed == 0


def test_two_runs_of_one_seed_are_equal_and_of_two_seeds_are_not(letters, tiny_model, tmp_path):
    again = run(make_config(tiny_model, tmp_path))
    other = run(make_config(tiny_model, tmp_path, seed=7))
    assert measured(again) == measured(letters)
    assert measured(other) != measured(letters)
    assert played(again) == played(letters)


def test_rollouts_are_those_that_were_trained_on(letters):
    rows = read_journal(letters.rollouts)
    assert [step for step, _ in rows] == [0] * 8 + [1] * 8
    for step, trajectory in rows:
        [sample] = build_samples(trajectory)
        versions = {run.version for turn in trajectory.turns for run in turn.versions}
        assert versions == {step}
        assert sample.num_trained == sum(len(turn.response_ids) for turn in trajectory.turns) > 0
        assert (sample.rollout_logprobs[sample.response_mask] < 0).all()


def test_micro_batches_change_nothing(letters, tiny_model, tmp_path):
    other = run(make_config(tiny_model, tmp_path, actor_train=training(batch_size=2, gradient_accumulation_steps=2)))
    dynamic = {"use_dynamic_batching_in_train": True, "max_tokens_per_microbatch_in_train": 150}
    third = run(make_config(tiny_model, tmp_path, actor_train=training() | dynamic))
    for name in ("actor/pg_loss", "actor_train/grad_norm", "rollout/score/mean", "actor/entropy"):
        expected = [row.get(name) for row in measured(letters)[:1]]
        for changed in (other, third):
            np.testing.assert_allclose([row.get(name) for row in measured(changed)[:1]], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "metric"),
    [
        ({"use_kl_loss": True, "kl_loss_coef": 0.1}, "actor/kl_loss"),
        ({"add_token_level_kl": True, "init_kl_coef": 0.1}, "critic/kl"),
        ({"add_token_level_kl": True, "init_kl_coef": 0.1, "target_kl": 0.01}, "critic/kl_coef"),
    ],
)
def test_a_reference_is_loaded_where_a_kl_needs_one(tiny_model, tmp_path, changes, metric):
    rows = measured(run(make_config(tiny_model, tmp_path, max_steps=3, eval_steps=0, **changes)))
    assert rows[-1][metric] != 0.0, "the policy has moved away from the reference by the third step"


def test_the_hf_server_plays_the_same_main_job(tiny_model, tmp_path):
    changes = {"max_steps": 1, "eval_steps": 0, "actor_infer": {"strategy_args": {"strategy_name": "hf"}}}
    [row] = measured(run(make_config(tiny_model, tmp_path, **changes)))
    assert row["actor/train_infer_diff_token_max"] < 1e-4


def test_sampler_and_trainer_agree(letters):
    for row in measured(letters)[:2]:
        assert row["actor/train_infer_diff_token_mean"] < 1e-6
        assert row["actor/train_infer_diff_token_max"] < 1e-4


def test_an_environment_that_raises_ends_the_run_with_its_error(tiny_model, tmp_path):
    envs = {"Broken": {"env_type": "odd_envs:RaisingEnv"}}
    config = make_config(tiny_model, tmp_path, custom_envs=envs, eval_steps=0)
    with pytest.raises(RolloutError, match="most frequent error"):
        run(config)


def test_what_this_version_lacks_is_refused_before_anything_is_loaded(tmp_path):
    config = make_config(tmp_path / "no_model", tmp_path, trace={"backend": "jsonl"}, sequence_length=256)
    with pytest.raises(NotAvailableError, match="tracing"):
        build_agentic(config, start_run(config))


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


def test_a_sampler_of_another_dtype_has_its_own_weights(tiny_model, tmp_path):
    config = make_config(tiny_model, tmp_path, max_steps=2, eval_steps=0, actor_infer={"model_args": {"dtype": "bf16"}})
    rows = measured(run(config))
    assert all(1e-5 < row["actor/train_infer_diff_token_mean"] < 0.05 for row in rows)


def test_critic_warmup_without_a_critic_changes_nothing(letters, tiny_model, tmp_path):
    assert measured(run(make_config(tiny_model, tmp_path, critic_warmup=2))) == measured(letters)


def test_own_estimators_and_agents_come_as_module_and_class(tiny_model, tmp_path, monkeypatch):
    (tmp_path / "my_parts.py").write_text(
        "from turnwise.agents.env_agent import EnvAgent\n"
        "from turnwise.algorithms.score_estimator import GRPO\n"
        "from turnwise.types import Metric\n\n\n"
        "class MyGRPO(GRPO):\n"
        "    def credit(self, groups):\n"
        "        return [*super().credit(groups), Metric('mine/credit', 1.0)]\n\n\n"
        "class MyAgent(EnvAgent):\n"
        "    async def run(self, *args):\n"
        "        [trajectory] = await super().run(*args)\n"
        "        trajectory.metrics['mine'] = 2.0\n"
        "        return [trajectory]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    envs = {"Letters": LETTERS | {"max_steps": 3, "agent_name": "my_parts:MyAgent"}}
    config = make_config(tiny_model, tmp_path, max_steps=1, eval_steps=0, adv_estimator="my_parts:MyGRPO", custom_envs=envs)
    [row] = measured(run(config))
    assert row["mine/credit"] == 1.0 and row["env/Letters/mine"] == 2.0


def test_wrong_parts_are_named_before_a_model_is_loaded(tmp_path):
    config = make_config(broken_model(tmp_path / "no_model"), tmp_path, adv_estimator="nowhere:Class")
    with pytest.raises(ConfigError, match="nowhere"):
        build_agentic(config, start_run(config))


def test_a_checkpoint_holds_the_state_of_the_loop(letters):
    state = json.loads((letters.path / "checkpoints" / "checkpoint-2" / "pipeline.json").read_text())
    assert state["step"] == 2 and state["rollouts"]["next_index"] == 4


def test_gradients_are_clipped_to_the_configured_norm(letters, tiny_model, tmp_path):
    rows = measured(run(make_config(tiny_model, tmp_path, max_grad_norm=1e-12)))
    assert rows[0]["actor_train/grad_norm"] != measured(letters)[0]["actor_train/grad_norm"]
    assert rows[0]["rollout/score/mean"] == measured(letters)[0]["rollout/score/mean"]


def test_end_tokens_of_the_generation_config_end_a_turn(tiny_model, tmp_path):
    config = make_config(tiny_model, tmp_path)
    policy = open_served_policy(config)
    policy.close()
    assert set(policy.template.stop_token_ids) >= set(policy.info.stop_token_ids)
    assert len(policy.info.stop_token_ids) == 2
