"""LoRA in whole runs: the reference without a second model, the engine's merged copy, adapter folders in and
out."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from messages import mentions, says
from peft import PeftModel
from safetensors.torch import load_file
from small_runs import assert_same_weights, measured, run_small, sft_config, small_config, training
from toy_model import toy_samples
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from turnwise.assemble.agentic import build_agentic
from turnwise.assemble.run import start_run
from turnwise.assemble.run_table import settings_table
from turnwise.assemble.saved import evaluate_model
from turnwise.assemble.sft import build_sft
from turnwise.errors import CheckpointError, ConfigError, ModelError, ParityError
from turnwise.examine.examined import examine
from turnwise.models.load import load_model
from turnwise.models.value_head import load_value_model
from turnwise.tracking.jsonl import read_metrics
from turnwise.training.torch_strategy import TorchStrategy

TRAINING = training(1e-2, 8)


def config_of(model, output_dir, lora=None, /, **changes):
    own = {
        "max_steps": 2,
        "eval_steps": 0,
        "val_batch_size": 4,
        "use_kl_loss": True,
        "actor_train": {"model_args": {"lora_rank": 4, **(lora or {})}, **TRAINING},
        "val_env_manager": {"num_env_groups": 4},
    }
    return small_config(model, output_dir, **own | changes)


@pytest.fixture
def make_config(tiny_model, tmp_path):
    return partial(config_of, tiny_model, tmp_path / "runs")


@pytest.fixture(scope="module")
def trained(tiny_model, tmp_path_factory):
    """A pipeline after a step."""
    return run_small(config_of(tiny_model, tmp_path_factory.mktemp("trained"), max_steps=1))


@pytest.fixture
def build(make_config):
    """Builds pipelines, and closes those that were not run."""
    pipelines = []

    def make(lora=None, **changes):
        config = make_config(lora, **changes)
        pipelines.append(build_agentic(examine(config), start_run(config)))
        return pipelines[-1]

    yield make
    for pipeline in pipelines:
        if pipeline.folder.lock is not None:
            pipeline.close()


def finished(pipeline):
    with closing(pipeline):
        pipeline.run()
    return pipeline


def strategy_of(role):
    return role.workers.worker


def nudge(pipeline):
    """As if the adapters had learnt something."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in strategy_of(pipeline.actor_train).model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)


def rows(pipeline):
    return dict(settings_table(pipeline).rows)


# One run


@pytest.mark.parametrize(
    ("changes", "bound"),
    [
        ({}, 1e-5),
        ({"actor_infer": {"strategy_args": {"strategy_name": "hf"}}}, 1e-5),
        ({"actor_infer": {"model_args": {"dtype": "bf16"}}}, 0.1),
    ],
)
def test_the_servers_sample_from_the_merged_policy_after_every_update(build, tmp_path, changes, bound):
    pipeline = build(eval_steps=10, **changes)
    pipeline.run()
    metrics = read_metrics(pipeline.folder.metrics)
    assert len(metrics) == pipeline.pipeline_config.max_steps + 1
    assert all(row["parity/logprob_diff_mean"] < bound for row in metrics)
    assert abs(metrics[0]["actor/kl_loss"]) < 1e-8 < 1e-5 < metrics[-2]["actor/kl_loss"]
    adapter = pipeline.checkpoints.newest
    base = AutoModelForCausalLM.from_pretrained(pipeline.pipeline_config.pretrain)
    merged = PeftModel.from_pretrained(base, adapter).merge_and_unload()
    [server] = pipeline.actor_infer.servers
    rounding = 2**-7 if server.model.dtype == torch.bfloat16 else 0
    for name, tensor in server.model.named_parameters():
        torch.testing.assert_close(tensor.float(), merged.get_parameter(name), rtol=rounding, atol=1e-6)
    moved = server.model.get_parameter("model.layers.0.self_attn.q_proj.weight").float()
    start = load_model(pipeline.pipeline_config.pretrain).get_parameter(
        "model.layers.0.self_attn.q_proj.weight"
    )
    assert (moved - start).abs().max() > 1e-3
    evaluation = evaluate_model(examine(pipeline.pipeline_config), model_path=str(adapter))
    assert evaluation.overall.mean_score == pytest.approx(metrics[-1]["val/score/mean"], abs=1e-9)


def test_the_table_says_what_is_trained(build):
    said = rows(build({"lora_dropout": 0.1, "lora_target": "q_proj"}))
    assert (
        "adapters" in said
        and said["adapters"] == "LoRA of rank 4, alpha 8, dropout 0.1, in 2 modules: q_proj"
    )
    total, trainable = (
        int(word.replace(",", "")) for word in said["model"].split(": ")[1].split() if word[0].isdigit()
    )
    assert trainable == 2 * 4 * (32 + 32) and said["model"].endswith(f"trainable ({trainable / total:.2%})")
    assert said["reference"] == "the policy's own weights with the adapter off"
    assert "a copy with the adapters merged" in said["actor_infer"]
    assert "AdamW at 0.01" in said["optimiser"]


def test_a_checkpoint_is_a_peft_folder_with_a_tokenizer(trained):
    folder = trained.checkpoints.newest
    names = {path.name for path in folder.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "trainer_state.pt"} < names
    assert "model.safetensors" not in names and "config.json" not in names
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert (
        Path(settings["base_model_name_or_path"]).is_absolute()
        and settings["r"] == 4
        and settings["lora_alpha"] == 8
    )
    weights = load_file(folder / "adapter_model.safetensors")
    assert (
        sum(t.numel() for t in weights.values())
        == strategy_of(trained.actor_train).info().model.num_trainable
    )


def test_all_linear_trains_every_linear_module_but_the_head(build, trained):
    """So does no target."""
    folders = [
        finished(build({"lora_target": "all-linear"}, max_steps=1)).checkpoints.newest,
        trained.checkpoints.newest,
    ]
    first, second = (
        set(json.loads((f / "adapter_config.json").read_text())["target_modules"]) for f in folders
    )
    assert first == second >= {"q_proj", "down_proj"} and "lm_head" not in first


# The reference


def test_the_reference_is_the_policy_without_its_adapter(build, tiny_model):
    pipeline = build()
    assert strategy_of(pipeline.reference) is strategy_of(pipeline.actor_train)
    nudge(pipeline)
    samples = toy_samples(5)
    pipeline.reference.compute_log_probs(samples, into="ref_logprobs")
    pipeline.reference.workers.worker = TorchStrategy(load_model(tiny_model))
    pipeline.reference.is_base = False
    for sample, expected in zip(samples, pipeline.reference.forward(samples, "logprobs"), strict=True):
        np.testing.assert_array_equal(sample.ref_logprobs, expected)


def test_a_reference_of_its_own_is_loaded(build, make_config, tiny_model, tmp_path):
    """Where another model is asked for, or the policy has no adapter that could be off."""
    others = [
        {"reference": {"model_args": own}} for own in ({"dtype": "bf16"}, {"attn_implementation": "sdpa"})
    ]
    assert not any(make_config(**own).is_reference_in_policy for own in (*others, {"actor_train": TRAINING}))
    (tmp_path / "other").symlink_to(tiny_model)
    pipeline = build(reference={"model_args": {"model_name_or_path": str(tmp_path / "other")}})
    assert strategy_of(pipeline.reference).model is not strategy_of(pipeline.actor_train).model
    assert rows(pipeline)["reference"].startswith(str(tmp_path / "other"))


# Going on


def test_a_run_that_goes_on_is_the_run_that_was_never_stopped(build):
    lora = {"lora_dropout": 0.2}
    whole = finished(build(lora, max_steps=4))
    resumed = finished(
        build(lora, max_steps=4, resume_from_checkpoint=str(whole.checkpoints.path / "checkpoint-2"))
    )
    assert len(measured(whole.folder)) == 4 and measured(resumed.folder) == measured(whole.folder)
    assert_same_weights(resumed.checkpoints.newest, whole.checkpoints.newest, "adapter_model.safetensors")


def test_what_an_adapter_cannot_be_continued_with_is_refused(
    build, make_config, trained, tiny_model, tmp_path
):
    checkpoint = str(shutil.copytree(trained.checkpoints.newest, tmp_path / "checkpoint-1"))
    refused = {
        "lora_rank": 8,
        "lora_alpha": 3.0,
        "lora_target": "q_proj",
        "freeze_module_prefix": "model.layers.0",
    }
    for name, value in refused.items():
        with pytest.raises(CheckpointError, match=rf"{name}: .*other parameters would be trained"):
            start_run(make_config({name: value}, resume_from_checkpoint=checkpoint))
    model = load_model(tiny_model)
    with torch.no_grad():
        model.model.norm.weight.mul_(1.5)
    model.save_pretrained(tmp_path / "other")
    for file in tiny_model.glob("*token*"):
        (tmp_path / "other" / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ModelError, match=says("another base model", "set pretrain")):
        build(resume_from_checkpoint=checkpoint, pretrain=str(tmp_path / "other"))


# Adapters as a start


def test_training_starts_from_an_adapter_folder_merged(build, trained):
    """So does a critic."""
    start = trained.checkpoints.newest
    expected = dict(load_model(start).named_parameters())
    full = build(pretrain=str(start), actor_train=TRAINING, max_steps=1, adv_estimator="gae")
    assert rows(full)["model"].startswith(f"{start}, an adapter merged into ") and "adapters" not in rows(
        full
    )
    assert strategy_of(full.reference).model is not strategy_of(full.actor_train).model
    for role in (full.actor_train, full.reference):
        assert all(torch.equal(tensor, expected[name]) for name, tensor in strategy_of(role).weights())
    finished(full)

    again = build(pretrain=str(start), max_steps=1)
    assert again.reference.is_base
    assert all(
        torch.equal(tensor, expected[name]) for name, tensor in strategy_of(again.actor_train).weights()
    )
    folder = finished(again).checkpoints.newest
    base = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert base == str(again.folder.path.resolve() / "base_model")
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder).merge_and_unload()
    for name, tensor in strategy_of(again.actor_train).weights():
        torch.testing.assert_close(theirs.get_parameter(name), tensor, rtol=0, atol=1e-6)


def test_a_critic_s_own_adapters_and_its_head_are_trained_saved_and_gone_on_with(build, tiny_model):
    keys = {
        "adv_estimator": "gae",
        "critic": {"model_args": {"lora_rank": 2, "lora_dropout": 0.1}, **TRAINING},
    }
    pipeline = build(**keys)
    assert rows(pipeline)["its adapters"] == (
        "LoRA of rank 2, alpha 4, dropout 0.1, in 14 modules: "
        "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj; and the value head"
    )
    start = strategy_of(pipeline.critic).model.base_model.embed_tokens.weight.clone()
    critic = strategy_of(finished(pipeline).critic).model
    assert torch.equal(start, critic.base_model.embed_tokens.weight) and critic.score.weight.abs().max() > 0
    first, last = (pipeline.checkpoints.path / f"checkpoint-{step}" / "critic" for step in (1, 2))
    saved = load_file(last / "adapter_model.safetensors")
    assert (
        torch.equal(saved["base_model.model.score.weight"], critic.score.weight.cpu())
        and len(saved) == 2 * 14 + 2
    )
    assert all(tensor.any() for name, tensor in saved.items() if "lora_B" in name), (
        "adapters learn once the head isn't 0"
    )

    samples = toy_samples(5)
    values = pipeline.critic.forward(samples, "values")
    again = finished(build(**keys, resume_from_checkpoint=str(first.parent)))
    for here, there in zip(values, again.critic.forward(samples, "values"), strict=True):
        np.testing.assert_array_equal(here, there)
    elsewhere = build(**keys | {"reward_pretrain": str(last), "max_steps": 1})
    for here, there in zip(values, elsewhere.critic.forward(samples, "values"), strict=True):
        np.testing.assert_allclose(here, there, atol=1e-5)
    finished(elsewhere)
    theirs = AutoModelForTokenClassification.from_pretrained(tiny_model, num_labels=1)
    theirs = PeftModel.from_pretrained(theirs, last).merge_and_unload()
    torch.testing.assert_close(theirs.state_dict(), load_value_model(last).state_dict(), rtol=0, atol=1e-6)
    with pytest.raises(ModelError, match=says("critic", "value head")):
        load_model(last)
    keys["critic"]["model_args"]["freeze_module_prefix"] = ["score"]
    assert rows(build(**keys, reward_pretrain=str(last), max_steps=1))["its adapters"].endswith("v_proj"), (
        "the head is frozen"
    )


def test_fine_tuning_trains_adapters_too(tiny_model, tmp_path, make_config):
    lora = {"lora_rank": 8, "lora_dropout": 0.1}
    config = sft_config(
        tiny_model, tmp_path, exp_name="sft", num_epochs=4, model_args=lora, **training(3e-2, 8)
    )
    pipeline = build_sft(examine(config), start_run(config))
    assert mentions(rows(pipeline)["adapters"], "rank 8", "alpha 16", "14 modules")
    finished(pipeline)
    losses = [row["sft/loss"] for row in read_metrics(pipeline.folder.metrics)]
    assert losses[-1] < losses[0] - 1
    config = make_config(pretrain=str(pipeline.checkpoints.newest), max_steps=1)
    finished(build_agentic(examine(config), start_run(config)))


# What goes wrong


def test_a_server_without_the_adapter_is_named(build):
    pipeline = build()
    nudge(pipeline)
    suspend, resume = pipeline.actor_infer.suspend, pipeline.actor_infer.resume

    class OnlyTold:
        async def update(self, version):
            await suspend()
            await resume(version)
            return []

    pipeline.weight_transfer = OnlyTold()
    with pytest.raises(ParityError, match=says("adapter", "not loaded")):
        pipeline.model_update(0)


def test_names_that_are_not_in_the_model_are_refused_at_the_start(build):
    with pytest.raises(ConfigError, match=says("lora_target", "'q_prj'", "'q_proj'")):
        build({"lora_target": ["q_prj"]})
    with pytest.raises(ConfigError, match=r"freeze_module_prefix: .*'model.layer.0'"):
        build({"freeze_module_prefix": ["model.layer.0"]})
    with pytest.raises(ConfigError, match=says("freeze_module_prefix", "every parameter")):
        build(actor_train={"model_args": {"freeze_module_prefix": ["model"]}, **TRAINING})
    with pytest.raises(ConfigError, match=r"freeze_module_prefix: .*'nothing'"):
        build(adv_estimator="gae", critic={"model_args": {"freeze_module_prefix": ["nothing"]}})
    for lora in ({}, {"lora_rank": 2}):
        with pytest.raises(ConfigError, match=says("freeze_module_prefix", "score", "value head")):
            build(adv_estimator="gae", critic={"model_args": {"freeze_module_prefix": ["score"], **lora}})
