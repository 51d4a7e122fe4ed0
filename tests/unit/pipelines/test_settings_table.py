"""The table at the start of a run says what its objects are, not what the config asked for."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest
from messages import mentions
from settings.answers import BASE
from small_runs import sft_config, training, write_demonstrations

from turnwise.assemble.agentic import build_agentic
from turnwise.assemble.run import start_run
from turnwise.assemble.run_table import settings_table
from turnwise.assemble.saved import evaluate_model
from turnwise.assemble.sft import build_sft
from turnwise.config import AgenticConfig, SettingsTable, parse_config
from turnwise.examine.examined import examine
from turnwise.models.cpu.build import load_kernels


@pytest.fixture
def built(tiny_model, tmp_path) -> Iterator:
    pipelines = []

    def build(**changes):
        values = BASE[AgenticConfig] | {"pretrain": str(tiny_model), "output_dir": str(tmp_path)} | changes
        config, _ = parse_config(values, AgenticConfig)
        pipelines.append(build_agentic(examine(config), start_run(config)))
        return pipelines[-1]

    yield build
    for pipeline in pipelines:
        pipeline.close()


def rows(pipeline) -> dict[str, str]:
    return dict(settings_table(pipeline).rows)


def model_of(role):
    return role.workers.worker.model


def test_parameters_are_counted_on_the_model(built) -> None:
    pipeline = built()
    model = model_of(pipeline.actor_train)
    total = sum(parameter.numel() for parameter in model.parameters())
    assert f"{total:,} parameters, {total:,} trainable" in rows(pipeline)["model"]
    model.get_input_embeddings().weight.requires_grad_(False)
    frozen = model.get_input_embeddings().weight.numel()
    assert f"{total:,} parameters, {total - frozen:,} trainable" in rows(pipeline)["model"]


def test_a_run_that_goes_on_names_its_checkpoint_and_the_model_that_it_began_with(built, tiny_model) -> None:
    pipeline = built()
    begun = rows(pipeline)["model"]
    assert tiny_model.name in begun and "checkpoint" not in begun
    pipeline.checkpoints.num_done = 2
    assert rows(pipeline)["model"].startswith("checkpoint-2") and begun in rows(pipeline)["model"]


def test_a_critic_counts_its_value_head(built) -> None:
    pipeline = built(adv_estimator="gae")
    policy, critic = (
        sum(p.numel() for p in model_of(role).parameters())
        for role in (pipeline.actor_train, pipeline.critic)
    )
    assert f"{critic:,} parameters, {critic:,} trainable" in rows(pipeline)["critic"] and critic != policy


OWN = ", own kernels" if load_kernels() else ""


@pytest.mark.parametrize(
    ("name", "said"), [("auto", f"packed{OWN}"), ("sdpa", "sdpa, padded"), ("eager", "eager, padded")]
)
def test_the_attention_kernel_is_the_model_s(built, name, said) -> None:
    pipeline = built(actor_train={"model_args": {"attn_implementation": name}})
    assert rows(pipeline)["actor_train"].endswith(f"attention {said}")
    model_of(pipeline.actor_train).set_attn_implementation("eager")
    assert rows(pipeline)["actor_train"].endswith("attention eager, padded")


def test_the_server_says_whose_parameters_it_reads(built) -> None:
    assert mentions(rows(built())["actor_infer"], "fp32", "trainer's own")
    assert mentions(rows(built(actor_infer={"model_args": {"dtype": "bf16"}}))["actor_infer"], "bf16", "copy")
    options = {"strategy_config": {"kv_cache_bytes": 2**20, "max_concurrency": 3}}
    said = rows(built(actor_infer={"strategy_args": options}))["actor_infer"]
    assert mentions(said, "3 requests", "1.0 MB")
    assert (
        "transformers generate"
        in rows(built(actor_infer={"strategy_args": {"strategy_name": "hf"}}))["actor_infer"]
    )


def test_steps_follow_from_the_plan(built) -> None:
    arguments = {
        "learning_rate": 0.5,
        "per_device_train_batch_size": 1,
        "lr_scheduler_type": "linear",
        "warmup_ratio": 0.5,
    }
    said = rows(
        built(ppo_epochs=3, actor_train={"training_args": arguments, "use_dynamic_batching_in_train": True})
    )
    assert said["optimiser steps"].startswith("12 × 1 sample in 3 passes")
    assert mentions(said["optimiser"], "AdamW", "0.5", "linear", "6 of 12")
    assert mentions(said["micro-batches"], "4096 tokens", "1 samples")


def test_a_role_that_is_not_there_has_no_row(built) -> None:
    assert {"reference", "critic"}.isdisjoint(rows(built()))
    assert "reference" in rows(built(use_kl_loss=True))


def test_the_table_is_one_screen_and_in_the_log(built) -> None:
    pipeline = built(adv_estimator="gae", use_kl_loss=True, eval_steps=1)
    lines = settings_table(pipeline).text().splitlines()
    [log] = pipeline.folder.path.glob("*.log")
    assert len(lines) <= 24 and "\n".join(lines) in log.read_text()


def test_sft_and_evaluation_have_theirs(tiny_model, tmp_path) -> None:
    files = write_demonstrations(tmp_path / "demos.jsonl", 3)
    config = sft_config(tiny_model, tmp_path, train_files=files, num_epochs=2, **training(batch_size=2))
    pipeline = build_sft(examine(config), start_run(config))
    pipeline.close()
    assert rows(pipeline)["steps"] == "4 of 2 samples, 2 epochs"
    said: list[SettingsTable] = []
    config, _ = parse_config(
        BASE[AgenticConfig] | {"pretrain": str(tiny_model), "eval_steps": 1}, AgenticConfig
    )
    evaluate_model(examine(config), on_start=said.append)
    assert dict(said[0].rows)["env Toy"].startswith("odd_envs:CrowdEnv by env_agent")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_table_and_a_file_plain_lines(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    settings = SettingsTable([("model", "m " * 40), ("KL", "none [b]")])
    plain, terminal = io.StringIO(), Terminal()
    settings.show(plain)
    settings.show(terminal)
    assert plain.getvalue() == settings.text() + "\n"
    assert "none [b]" in terminal.getvalue() and max(map(len, terminal.getvalue().splitlines())) < 80


def test_a_quiet_run_logs_its_table_and_prints_none(built, capsys, caplog) -> None:
    with caplog.at_level(logging.INFO, "turnwise"):
        pipeline = built()
    assert "what this run applies" in caplog.text
    assert "actor_train" not in capsys.readouterr().out
    settings_table(pipeline).show()
    assert "actor_train" in capsys.readouterr().out
