"""Supervised fine-tuning learns what its demonstrations say, on assistant tokens only."""

from __future__ import annotations

import json
from contextlib import closing

import pytest
import torch
from messages import says
from small_runs import sft_config, write_demonstrations
from transformers import AutoModelForCausalLM

from turnwise.assemble.run import start_run
from turnwise.assemble.sft import build_sft
from turnwise.chat.template import ChatTemplate
from turnwise.config import SFTConfig, parse_config
from turnwise.errors import ConfigError, DataError
from turnwise.examine.demonstrations import encode_all
from turnwise.examine.examined import examine
from turnwise.models.load import load_model, load_tokenizer, save_model
from turnwise.tracking.jsonl import read_metrics


def fine_tune(tiny_model, tmp_path, **changes):
    config = sft_config(tiny_model, tmp_path, **{"num_epochs": 3} | changes)
    with closing(build_sft(examine(config), start_run(config))) as pipeline:
        pipeline.run()
    return pipeline, read_metrics(pipeline.folder.metrics)


def test_the_loss_falls_and_the_model_is_saved(tiny_model, tmp_path):
    val = write_demonstrations(tmp_path / "val.jsonl", 3)
    pipeline, rows = fine_tune(tiny_model, tmp_path, val_files=[val], eval_steps=5)
    assert pipeline.num_steps == 15
    assert rows[0]["sft/loss"] > 3 and rows[14]["sft/loss"] < 1
    assert [row["step"] for row in rows if "sft/val_loss" in row] == [0, 5, 10, 15]
    assert rows[-1]["sft/val_loss"] < 1
    AutoModelForCausalLM.from_pretrained(pipeline.checkpoints.path / "checkpoint-15")


def test_a_row_that_is_too_long_is_named(tiny_model, tmp_path):
    path = write_demonstrations(tmp_path / "long.jsonl", 1, answer="P _ " * 100)
    with pytest.raises(DataError, match=says("line 1", "sequence_length 64")):
        fine_tune(tiny_model, tmp_path, train_files=[path])


def test_rows_that_are_too_long_bad_or_empty_are_counted(tiny_model, tmp_path, caplog):
    def row(answer, **others):
        return json.dumps(
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": answer, **others},
                ]
            }
        )

    path = tmp_path / "rows.jsonl"
    path.write_text(
        "\n".join([row("b"), row("P _ " * 100), row("b", weight=0.5), "{", row(""), row("b", weight=0)])
    )
    config = sft_config(tiny_model, tmp_path, train_files=[str(path)])
    template = ChatTemplate(load_tokenizer(tiny_model))
    with pytest.raises(DataError, match=says("3 rows")) as caught:
        examine(config).demonstrations("train_files")
    assert all(f"line {number}" in str(caught.value) for number in (3, 4, 6))
    skipping = sft_config(tiny_model, tmp_path, train_files=[str(path)], data={"on_bad_row": "skip"})
    read = examine(skipping).demonstrations("train_files")
    assert len(encode_all(skipping, template, "train_files", read)) == 2
    for words in (
        "1 of 3 rows are left out",
        "3 of 6 rows are left out",
        "1 row would teach an empty answer",
    ):
        assert words in caplog.text


def test_the_best_model_is_kept_and_a_run_that_only_gets_worse_on_validation_ends(tiny_model, tmp_path):
    other = write_demonstrations(tmp_path / "val.jsonl", 3, answer="O O X")
    pipeline, rows = fine_tune(
        tiny_model,
        tmp_path,
        val_files=[other],
        eval_steps=2,
        num_epochs=20,
        save_best={},
        early_stopping={"patience": 2},
    )
    losses = {row["step"]: row["sft/val_loss"] for row in rows if "sft/val_loss" in row}
    best = min(losses, key=losses.get)
    assert json.loads((pipeline.folder.best / "best.json").read_text())["step"] == best
    AutoModelForCausalLM.from_pretrained(pipeline.folder.best)
    assert pipeline.num_steps == max(losses) == best + 4 < 100, "two validations without a better one end it"
    assert (pipeline.checkpoints.path / f"checkpoint-{pipeline.num_steps}").is_dir()


def test_a_run_that_its_first_validation_ends_leaves_the_model_it_began_with(tiny_model, tmp_path):
    model = load_model(tiny_model)
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    save_model(model, load_tokenizer(tiny_model), tmp_path / "broken")
    val = [write_demonstrations(tmp_path / "val.jsonl", 3)]
    pipeline, _ = fine_tune(
        tmp_path / "broken", tmp_path, val_files=val, eval_steps=1, early_stopping={"patience": 1}
    )
    assert pipeline.num_steps == 0 and pipeline.checkpoints.newest.name == "checkpoint-0"


def test_what_only_validations_decide_needs_them(tiny_model):
    with pytest.raises(ConfigError, match=says("early_stopping", "eval_steps", "val_files")):
        parse_config(
            {"pretrain": str(tiny_model), "train_files": ["x.jsonl"], "early_stopping": {}}, SFTConfig
        )
