"""The pipeline of six stages, and both commands."""

from __future__ import annotations

import json
import re
from html import escape
from pathlib import Path

import pytest
from messages import mentions, says

from turnwise import AgenticRLPipeline
from turnwise.cli.main import main
from turnwise.errors import ConfigError
from turnwise.rl_tool.comparison import compare_stages
from turnwise.rl_tool.pipeline import StageError
from turnwise.rl_tool.report_page import write_report


@pytest.fixture
def write(word_model, tmp_path):
    def write(**changes):
        small = {"num_epochs": 1, "batch_size": 2, "use_lora": True}
        sections = {
            "model": {"base_model": word_model},
            "data": {"max_samples": 4},
            "sft": {"output_dir": "out/sft", **small},
            "grpo": {"output_dir": "out/grpo", "num_generations": 2, "max_new_tokens": 16, **small},
            "eval": {"max_samples": 3, "max_new_tokens": 16},
            "monitoring": {"use_tensorboard": False},
        }
        changed = {name: section | changes.get(name, {}) for name, section in sections.items()}
        file = tmp_path / "config.json"
        file.write_text(json.dumps({**changed, "output_dir": "out"}))
        return file

    return write


def test_six_stages_then_nothing_is_done_twice(write, capsys):
    answer = AgenticRLPipeline(write()).run()
    assert answer["status"] == "success", answer
    results = json.loads(Path("out/training_results.json").read_text())
    assert (
        isinstance(results["grpo_evaluation"]["accuracy"], float)
        and results["data"]["dataset"] == "generated"
    )
    report = Path("out/report.html").read_text()
    assert report.count("data:image/png;base64") == 2 and "Answers after sft and after grpo" in report
    assert report.count("<tr><td>dataset</td><td>generated</td></tr>") == 6
    comparison = results["comparison"]
    assert comparison == answer["comparison"] and comparison["sentence"] in capsys.readouterr().out
    assert (
        comparison["training"]
        and "held-out" in comparison["sentence"]
        and escape(comparison["sentence"]) in report
    )
    assert results["grpo_training"]["model"] == "out/sft"
    assert Path(results["grpo_training"]["base_model"]).is_dir(), "new adapters are put onto the merged model"

    capsys.readouterr()
    assert main(["pipeline", "config.json"]) == 0
    printed = capsys.readouterr()
    assert printed.err.count("done already") == 6 and json.loads(printed.out)["status"] == "success"
    write(sft={"num_epochs": 2})
    assert main(["pipeline", "config.json"]) == 1
    assert mentions(json.loads(capsys.readouterr().out)["message"], "other parameters")


def test_a_stage_is_usable_alone_and_a_cut_file_of_results_is_named(write, word_model):
    pipeline = AgenticRLPipeline(write())
    assert pipeline.stage1_prepare_data()["dataset_size"] == 4
    measured = pipeline.stage5_grpo_evaluation(word_model)
    assert measured["num_samples"] == 3 and set(pipeline.results) == {"data", "rl_data", "grpo_evaluation"}
    file = Path(pipeline.stage6_save_results())
    whole = file.read_text()
    assert json.loads(whole) == pipeline.results == AgenticRLPipeline("config.json").results
    for broken in (whole[:50], "[1]"):
        file.write_text(broken)
        with pytest.raises(ConfigError, match=says("training_results.json", "remove")):
            AgenticRLPipeline("config.json")
    assert main(["pipeline", "config.json"]) == 1


def evaluated(accuracy: float, low: float, high: float) -> dict:
    return {
        "status": "success",
        "accuracy": accuracy,
        "accuracy_low": low,
        "accuracy_high": high,
        "num_samples": 100,
    }


@pytest.mark.parametrize(
    ("before", "after", "verdict", "is_significant", "words"),
    [
        (
            (0.07, 0.03, 0.14),
            (0.02, 0.006, 0.07),
            "worse",
            False,
            ["worse than after sft", "overlap", "carry over"],
        ),
        (
            (0.5, 0.4, 0.6),
            (0.1, 0.05, 0.2),
            "worse",
            True,
            ["worse than after sft", "don't overlap", "carry over"],
        ),
        (
            (0.4, 0.36, 0.45),
            (0.77, 0.73, 0.81),
            "better",
            True,
            ["better than after sft", "0.400 [0.360, 0.450] → 0.770"],
        ),
        ((0.0, 0.0, 0.04), (0.0, 0.0, 0.04), "equal", False, ["as good as", "carry over"]),
    ],
)
def test_the_end_says_in_words_whether_the_model_is_better_or_worse(
    before, after, verdict, is_significant, words, tmp_path
) -> None:
    metrics = [{"rollout/score/mean": score} for score in [0.8] * 5 + [0.9] * 5] + [{"val/score/mean": 0.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    training = {"run_folder": str(tmp_path), "kl": None, "status": "success"}
    results = {
        "sft_evaluation": {**evaluated(*before), "pass_at_k": {"1": 0.07}, "uses_lora": False},
        "grpo_training": training,
        "grpo_evaluation": evaluated(*after),
    }
    comparison = compare_stages(results)
    assert (comparison["verdict"], comparison["is_significant"]) == (verdict, is_significant)
    assert all(word in comparison["sentence"] for word in words), comparison["sentence"]
    assert comparison["training"] == {"before": pytest.approx(0.8), "after": pytest.approx(0.9)}

    write_report(tmp_path / "report.html", {**results, "comparison": comparison})
    page = (tmp_path / "report.html").read_text()
    headline = re.search("<h1.*?</h1>", page)[0]
    assert f"{before[0]:.3f} → {after[0]:.3f}" in headline and verdict in headline
    assert not re.search(r"None|[{]'|success|False", page) and "1: 0.07" in page


def test_a_pipeline_with_one_evaluation_has_no_comparison(tmp_path) -> None:
    results = {"sft_evaluation": evaluated(0.5, 0.4, 0.6)}
    assert compare_stages(results) == {}
    write_report(tmp_path / "report.html", results)
    assert "1 of 6 stages" in (tmp_path / "report.html").read_text()


class NotedTool:
    """A tool that does nothing, and notes what it is asked for."""

    def run(self, parameters):
        self.asked = parameters
        return json.dumps({"status": "success", "output_dir": "out"})


def test_the_model_that_counts_the_tokens_of_the_data_is_not_trained(write, word_model):
    pipeline = AgenticRLPipeline(write(data={"model_name": "models/counter"}))
    pipeline.rl_tool = tool = NotedTool()
    pipeline.stage2_sft_training()
    assert tool.asked["model_name"] == word_model and tool.asked["max_samples"] == 4
    pipeline.stage4_grpo_training("models/sft")
    assert tool.asked["model_name"] == "models/sft"


EXAMPLE = Path(__file__).parents[3] / "examples" / "rl_tool" / "pipeline.json"


def test_the_shipped_pipeline_has_a_gate():
    pipeline = AgenticRLPipeline(EXAMPLE)
    pipeline.check_gate({"accuracy": 0.5})
    with pytest.raises(StageError, match=r"below eval\.sft_accuracy_threshold"):
        pipeline.check_gate({"accuracy": 0.02})


def test_a_pipeline_that_ended_in_a_training_goes_on_in_it(write, fragile):
    def run(calls_left: int) -> dict:
        fragile.calls_left = calls_left
        pipeline = AgenticRLPipeline(file)
        pipeline.rl_tool.register_reward_function("fragile", fragile)
        return pipeline.run()

    file = write(grpo={"reward_type": "fragile", "batch_size": 1, "learning_rate": 0.01})
    stopped = run(calls_left=2)
    assert stopped["status"] == "error" and "the disk is full" in stopped["message"]
    assert not Path("out/grpo/adapter_config.json").exists()
    gone_on = run(calls_left=2)
    assert gone_on["status"] == "success", gone_on
    assert (
        gone_on["grpo_training"]["num_steps"] == 4 and len([*Path("out/grpo/run").glob("*/checkpoints")]) == 1
    )
    weights = Path("out/grpo/adapter_model.safetensors").read_bytes()

    # It was killed between the result and its record.
    results = json.loads(Path("out/training_results.json").read_text())
    Path("out/training_results.json").write_text(
        json.dumps({key: results[key] for key in results if "grpo" not in key})
    )
    assert run(calls_left=0)["status"] == "success"
    assert Path("out/grpo/adapter_model.safetensors").read_bytes() == weights


def test_a_training_is_overwritten_where_the_file_says_so(write):
    model = Path(AgenticRLPipeline(write()).stage2_sft_training(), "adapter_model.safetensors")
    before = model.read_bytes()
    Path("out/training_results.json").unlink()
    AgenticRLPipeline(write(sft={"overwrite": True, "seed": 7})).stage2_sft_training()
    assert model.read_bytes() != before


def test_a_folder_that_cannot_be_written_is_the_answer(write, monkeypatch):
    Path("taken").write_text("")
    file = write()
    file.write_text(json.dumps(json.loads(file.read_text()) | {"output_dir": "taken/out"}))
    answer = AgenticRLPipeline(file).run()
    assert answer["status"] == "error" and "taken" in answer["message"]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"output_dir": None}))
    with pytest.raises(ConfigError, match=says("output_dir", "None", "folder")):
        AgenticRLPipeline(file)


def test_a_model_below_the_gate_isn_t_trained_on(write):
    answer = AgenticRLPipeline(write(eval={"sft_accuracy_threshold": 1.0})).run()
    assert (
        answer["status"] == "error"
        and answer["code"] == "stage"
        and "sft_accuracy_threshold" in answer["message"]
    )
    assert (
        "sft_evaluation" in json.loads(Path("out/training_results.json").read_text())
        and not Path("out/grpo").exists()
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sft": {"num_epoch": 3}}, says("'num_epochs'", "num_epoch")),
        ({"grpo": {"output_dir": "out/sft"}}, "its own folder"),
        ({"eval": {"max_sample": 3}}, says("'max_samples'", "max_sample")),
        ({"data": {"num_epochs": 3}}, "num_epochs: unknown parameter"),
        ({"eval": {"sft_accuracy_threshold": 30}}, says("sft_accuracy_threshold", "from 0 to 1")),
        ({"model": {"base_modl": "m"}}, says("base_model", "no other")),
    ],
)
def test_a_wrong_file_is_refused_before_anything_runs(write, changes, said):
    with pytest.raises(ConfigError, match=said):
        AgenticRLPipeline(write(**changes))


@pytest.mark.parametrize(
    ("text", "said"), [("", "holds a NoneType"), ("- a", "holds a list"), ("model: m", "model is 'm'")]
)
def test_a_file_without_sections_is_refused(tmp_path, text, said):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        AgenticRLPipeline("config.yaml")


def test_the_command_prints_json_and_ends_with_1_after_an_error(capsys, word_model):
    assert main(["tool", "create_reward", "--reward-type", "step", "--step_bonus=0.5"]) == 0
    assert json.loads(capsys.readouterr().out)["step_bonus"] == 0.5
    assert main(["tool", "train", "--algorithm", "grop", "--model_name", word_model]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["status"] == "error" and "algorithm: " in answer["message"]
    for words in (["max_samples"], ["--use_lora", "true", "more"], ["--dataset=", "more"]):
        assert main(["tool", "load_dataset", *words]) == 1
        assert mentions(json.loads(capsys.readouterr().out)["message"], "belongs", "parameter")
