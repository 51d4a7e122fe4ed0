"""The tool: its parameters' effects, its answers, and everything that it refuses."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import shutil
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from chat_server import ChatServer
from messages import mentions, says
from safetensors.torch import save_file

from turnwise import RLTrainingTool
from turnwise.config.schema.model_shape import read_model_shape
from turnwise.data.gsm8k import generate_problems
from turnwise.errors import CheckpointError
from turnwise.rl_tool import evaluation, training
from turnwise.rl_tool.evaluation import Answer, measure
from turnwise.rl_tool.parameters import Train, parse
from turnwise.rl_tool.tool import error_answer
from turnwise.rl_tool.training import rl_config, sft_config, with_preset
from turnwise.trainer.trainer import Trainer

ROWS = [{"question": "What is 3 + 4?", "answer": "3 + 4 = <<3+4=7>>7\n#### 7"}] * 4


def ask(action, **parameters):
    return RLTrainingTool().run_dict({"action": action, **parameters})


def test_safe_learning_rates():
    rates = {}
    for algorithm in ("sft", "grpo", "ppo"):
        for use_lora in (False, True):
            asked = parse(Train, {"model_name": "models/none", "algorithm": algorithm, "use_lora": use_lora})
            config = sft_config(asked) if algorithm == "sft" else rl_config(asked, 10, {})["actor_train"]
            rates[algorithm, use_lora] = config["training_args"]["learning_rate"]
    assert rates["sft", False] == 2e-5 and rates["sft", True] == 1e-4
    assert (
        rates["grpo", False] == rates["ppo", False] == 1e-6
        and rates["grpo", True] == rates["ppo", True] == 1e-5
    )


@pytest.mark.parametrize(
    ("use_lora", "rate", "critic"),
    [(True, 1e-5, 1e-5), (False, 1e-6, 1e-5), (False, 3e-4, 1e-3), (False, 2e-3, 2e-3)],
)
def test_the_critic_s_rate_follows_the_policy_s(use_lora, rate, critic):
    given = {"model_name": "models/none", "algorithm": "ppo", "use_lora": use_lora, "learning_rate": rate}
    config = rl_config(parse(Train, given), 10, {})
    assert (
        config["critic"]["training_args"]["learning_rate"] == pytest.approx(critic)
        and config["whiten_advantages"]
    )


def test_launched_processes_share_a_step_s_samples(monkeypatch):
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    asked = parse(
        Train, {"model_name": "models/none", "algorithm": "grpo", "batch_size": 3, "num_generations": 4}
    )
    assert rl_config(asked, 10, {})["actor_train"]["training_args"]["per_device_train_batch_size"] == 6
    assert rl_config(asked, 10, {})["rollout_batch_size"] == 12


def test_the_run_s_config_accepts_what_the_tool_asks_for(word_model):
    given = {
        "lora_rank": 4,
        "lora_target_modules": ["q_proj"],
        "warmup_ratio": 0.5,
        "reward_config": {"step_bonus": 0.5},
    }
    asked = parse(Train, {"model_name": word_model, "algorithm": "grpo", "reward_type": "step", **given})
    rows = [{"prompt": "3 + 4", "ground_truth": "7"}]
    config = Trainer(model=word_model, train_dataset=rows, **rl_config(asked, 1, {})).config
    assert config.actor_train.model_args.lora_alpha == 8 and config.data.reward[1].args == {"step_bonus": 0.5}


GRPO = {"model_name": "M", "dataset": ROWS, "algorithm": "grpo"}
STEP = GRPO | {"reward_type": "step"}
REFUSED = [
    ({"action": "trian"}, "config", says("'train'", "trian")),
    ({"action": ["train"]}, "config", says("action", "['train']")),
    ({"model_name": "M", "preset": ["quick"]}, "config", says("preset", "['quick']")),
    (
        GRPO | {"reward_type": ["step", "format"], "reward_config": {"step": 5}},
        "config",
        says("reward_config.step", "dict"),
    ),
    ({"action": "train"}, "config", "model_name: is needed"),
    (
        {"model_nam": "x", "model_name": "M"},
        "config",
        says("model_nam", "'model_name'"),
    ),
    ({"model_name": "models/none"}, "not_available", "models/none"),
    ({"model_name": "M", "dataset": "gsm9k"}, "config", says("'gsm9k'", "'gsm8k'")),
    ({"model_name": "M", "dataset": "none.jsonl"}, "data", "none.jsonl"),
    ({"model_name": "M", "dataset": []}, "data", "has no rows"),
    (
        {"model_name": "M", "dataset": ROWS, "split": "test"},
        "config",
        says("split", "Python"),
    ),
    ({"model_name": "M", "dataset": [{"text": "a"}]}, "data", says("row 1", "columns text")),
    (GRPO | {"num_generations": 1}, "config", "num_generations is 1"),
    (
        {"model_name": "M", "dataset": ROWS, "lora_target_modules": ["q_prj"]},
        "config",
        says("'q_proj'", "q_prj"),
    ),
    ({"model_name": "M", "dataset": ROWS, "batch_size": 0}, "config", "batch_size: "),
    (GRPO | {"reward_type": "acuracy"}, "config", says("'accuracy'", "acuracy")),
    (STEP | {"reward_config": {"step_bonu": 1}}, "config", says("'step_bonus'", "step_bonu")),
    (GRPO | {"reward_type": []}, "config", "reward_type is empty"),
    (
        STEP | {"reward_config": {"step_bonus": "1"}},
        "config",
        says("reward step", "step_bonus='1'"),
    ),
    (
        {"model_name": "M", "dataset": [{"prompt": "a"}], "algorithm": "grpo"},
        "data",
        says("column", "ground_truth or answer"),
    ),
    (
        {"model_name": "M", "dataset": [*ROWS, {"question": "a", "answer": None}]},
        "data",
        says("row 5", "answer is null"),
    ),
    (
        {"model_name": "M", "dataset": [{"messages": "hello"}]},
        "data",
        says("row 1", "'hello'", "messages"),
    ),
    (
        {"model_name": "M", "dataset": [*ROWS, {"prompt": 5, "completion": "7"}]},
        "data",
        says("row 5", "message 0", "'5'"),
    ),
    (
        {"model_name": "M", "dataset": [{"prompt": 5}], "algorithm": "grpo"},
        "data",
        says("row 1", "'5'", "messages"),
    ),
    ({"model_name": "M", "output_dir": "kept"}, "config", says("output_dir kept", "file")),
    ({"model_name": "M", "resume": True, "overwrite": True}, "config", "contradict"),
    ({"model_name": "M", "resume_from_checkpoint": True}, "config", "calls it resume"),
    ({"model_name": "M", "preset": "tiny"}, "config", says("preset", "quick, small, medium, full")),
    ({"action": "evaluate", "model_path": "M", "use_lora": True}, "config", says("LoRA adapter")),
    (
        {"action": "evaluate", "model_path": "M", "dataset": [{"prompt": "a"}]},
        "data",
        "no column ground_truth",
    ),
    ({"action": "export", "model_path": "M", "output_dir": "."}, "config", "already exists"),
]


@pytest.mark.parametrize(("asked", "code", "said"), REFUSED)
def test_what_is_refused_is_an_error_with_code_and_message(word_model, tmp_path, asked, code, said):
    (tmp_path / "kept").write_text("")
    asked = {key: word_model if value == "M" else value for key, value in asked.items()}
    answer = json.loads(RLTrainingTool().run({"action": "train", "output_dir": "out"} | asked))
    assert answer["status"] == "error" and answer["code"] == code, answer
    assert re.search(said, answer["message"]), answer["message"]
    assert set(answer) == {"status", "action", "code", "message", "hint"} and answer["hint"], answer
    assert not [file for file in Path("out").rglob("*") if file.suffix in (".safetensors", ".json")]


@pytest.mark.parametrize(
    ("action", "words", "absent"),
    [
        ("train", "free some space.*resume=true", "resume_from_checkpoint"),
        ("pipeline", says("free some space", "same command"), "resume"),
        ("evaluate", "free some space", "resume"),
    ],
)
def test_advice_on_a_full_disk_is_in_the_words_of_the_action(action, words, absent):
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "out/x")
    elsewhere = "free some space, or point checkpoint_config.output_dir elsewhere or lower max_ckpt_to_keep"
    of_training = CheckpointError(
        f"out/x can't be written; {elsewhere}, then continue with resume_from_checkpoint=true"
    )
    for answer in [
        error_answer(error, action),
        *([error_answer(of_training, action)] if action != "evaluate" else []),
    ]:
        assert mentions(answer["message"], "out/x", "written") and absent not in answer["message"]
        assert re.search(words, answer["message"]) and "max_ckpt_to_keep" not in answer["message"]
    assert mentions(
        error_answer(PermissionError(errno.EACCES, "no", "out/x"), action)["hint"], "allow", "another place"
    )


@pytest.mark.parametrize(
    "returned",
    [
        lambda completions: [float("nan")] * len(completions),
        lambda completions: [1.0],
        lambda completions: 1 / 0,
    ],
)
def test_a_broken_reward_ends_as_an_error(word_model, returned):
    given = {"dataset": ROWS, "max_new_tokens": 4, "num_generations": 2, "custom_reward": returned}
    answer = ask("train", algorithm="grpo", model_name=word_model, **given)
    assert answer["status"] == "error" and "reward" in answer["message"], answer


@pytest.mark.parametrize("mode", ["pointwise", "pairwise"])
def test_a_judge_rewards_the_answers_of_each_group(word_model, mode):
    given = {
        "dataset": ROWS[:1],
        "max_new_tokens": 4,
        "num_generations": 2,
        "num_epochs": 1,
        "reward_type": "judge",
    }
    with ChatServer(lambda content: "Score: 4\nWinner: A") as server:
        config = {
            "base_url": server.base_url,
            "model": "small",
            "rubric": "It is short.",
            "mode": mode,
            "both_orders": True,
        }
        asked = {"algorithm": "grpo", "model_name": word_model, "reward_config": config, **given}
        answer = ask("train", **asked)
        assert answer["status"] == "success", answer
        assert answer["metrics"]["rollout/reward/judge"] == pytest.approx(
            {"pointwise": 0.4, "pairwise": 0.5}[mode]
        )
        assert len(server.asked) >= 2 and "What is 3 + 4?" in str(server.asked[0])
        server.body = lambda content: "I like it."
        answer = ask("train", **asked, overwrite=True)
        assert (
            answer["status"] == "error"
            and "judge" in answer["message"]
            and "without a line" in answer["message"]
        ), answer


def test_a_judge_needs_its_arguments():
    tool = RLTrainingTool()
    judge = {
        "action": "create_reward",
        "reward_type": "judge",
        "base_url": "http://localhost:1/v1",
        "model": "small",
    }
    assert "missing 1 required positional argument: 'rubric'" in tool.run_dict(judge)["message"]
    answer = tool.run_dict({**judge, "rubric": "It is short."})
    assert answer["status"] == "success" and answer["max_score"] == 10
    assert json.loads(tool.run({**judge, "rubric": "a"}))["rubric"]
    assert mentions(tool.run_dict({**judge, "max_scor": 5})["message"], "'max_score'")


def test_an_adapter_without_its_base_is_refused(tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": "models/gone"}')
    answer = ask("evaluate", model_path="adapter")
    assert answer["status"] == "error" and answer["code"] == "model", answer


@pytest.mark.parametrize("of_adapter", [False, True])
def test_the_model_that_a_training_starts_from_is_not_overwritten(word_model, tmp_path, of_adapter):
    shutil.copytree(word_model, "base")
    Path("adapter").mkdir()
    save_file({}, "adapter/adapter_model.safetensors")
    content = {"peft_type": "LORA", "base_model_name_or_path": str(tmp_path / "base")}
    Path("adapter/adapter_config.json").write_text(json.dumps(content))
    model = "adapter" if of_adapter else "base"
    answer = ask("train", model_name=model, dataset=ROWS, output_dir="./base", overwrite=True)
    assert answer["code"] == "config" and "to keep it" in answer["message"], answer
    assert Path("base/model.safetensors").is_file()


def test_rows_are_shown_and_examined():
    pairs = (("a", "#### 7"), ("a", "#### 7"), ("b", "#### ?"), (None, "#### 7"))
    broken = [{"question": question, "answer": answer} for question, answer in pairs]
    answer = ask("load_dataset", dataset=broken, format="rl")
    assert answer["quality"] == {
        "empty": 0,
        "null": 1,
        "duplicate": 1,
        "over_long": 0,
        "answer_not_extractable": 1,
    }
    assert len(answer["samples"]) == 3 and answer["dataset_object"][0]["ground_truth"] == "7"
    half = [{"messages": [{"role": "user"}, {"role": "assistant", "content": "#### 7"}]}]
    assert ask("load_dataset", dataset=half)["quality"]["null"] == 1
    odd = [
        {"prompt": "a", "ground_truth": 0},
        *({"question": "a", "answer": "#### 7", "messages": m} for m in ("b", ["b"], 5)),
    ]
    answer = ask("load_dataset", dataset=odd, format="rl")
    assert answer["quality"] == {
        "empty": 0,
        "null": 0,
        "duplicate": 2,
        "over_long": 0,
        "answer_not_extractable": 0,
    }
    assert "dataset_object" not in json.loads(
        RLTrainingTool().run({"action": "load_dataset", "max_samples": 2})
    )


@pytest.mark.parametrize("file", ["{}.jsonl", "main/{}-00000-of-00001.parquet"])
def test_a_folder_in_the_hub_s_layout_is_gsm8k(tmp_path, file, monkeypatch):
    rows = {"train": generate_problems(6), "test": generate_problems(2, "test")}
    for split in rows:
        path = tmp_path / "gsm8k" / file.format(split)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows[split]), path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows[split]))
    found = {split: ask("load_dataset", split=split, format="rl") for split in rows}
    assert {answer["dataset"] for answer in found.values()} == {"gsm8k"}
    monkeypatch.setenv("HOME", str(tmp_path))
    for split, answer in found.items():
        assert [row["question"] for row in answer["dataset_object"]] == [
            row["question"] for row in rows[split]
        ]
        for path in (str(tmp_path / "gsm8k"), "~/gsm8k"):
            by_path = ask("load_dataset", dataset=path, split=split, format="rl")
            assert by_path["dataset_object"] == answer["dataset_object"]
    if file == "{}.jsonl":
        assert "split: " in ask("load_dataset", dataset="gsm8k/test.jsonl", split="test")["message"]


def test_tools_of_demonstrations_are_trained_on(word_model):
    tools = [
        {
            "type": "function",
            "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}},
        }
    ]
    row = {
        "messages": [{"role": "user", "content": "3 + 4"}, {"role": "assistant", "content": "7"}],
        "tools": tools,
    }
    answer = ask("train", model_name=word_model, output_dir="out", num_epochs=1, dataset=[row, row])
    assert answer["status"] == "success", answer
    [file] = Path("out/run").glob("messages-*.jsonl")
    assert json.loads(file.read_text().splitlines()[0])["tools"] == tools


def test_registered_names_are_taken():
    tool = RLTrainingTool()
    tool.register_dataset("sums", ROWS)
    tool.register_reward_function(
        "brief", lambda completions, limit=3: [-len(text) / limit for text in completions]
    )
    assert tool.run_dict({"action": "load_dataset", "dataset": "sums"})["dataset_size"] == 4
    reward = tool.run_dict({"action": "create_reward", "reward_type": "brief", "limit": 2})
    assert reward["reward_function"](["abcd"]) == [-2.0] and reward["limit"] == 2


def test_presets_give_sizes_and_safe_rewards():
    safe, own = {"only_if_correct": True, "floor": 0.0, "max_steps": 5}, {"floor": -1.0}
    given = with_preset(
        {"model_name": "models/none", "algorithm": "grpo", "preset": "quick", "num_epochs": 2}
    )
    assert given["max_samples"] == 10 and given["num_epochs"] == 2

    def arguments(preset, reward_type, config):
        asked = parse(Train, given | {"preset": preset, "reward_type": reward_type, "reward_config": config})
        return {
            reward["name"]: reward.get("args", {}) for reward in rl_config(asked, 10, {})["data"]["reward"]
        }

    assert arguments("quick", "step", own)["step"] == safe | own
    assert arguments("quick", {"accuracy": 1.0, "step": 0.5}, {"step": own}) == {
        "accuracy": {},
        "step": safe | own,
    }
    assert arguments("quick", ["step", "length_penalty"], {})["length_penalty"] == {
        "only_if_correct": True,
        "floor": 0.0,
    }
    assert arguments(None, ["step", "length_penalty"], {}) == {
        "accuracy": {},
        "step": {},
        "length_penalty": {},
    }


def test_an_evaluation_warns_of_nothing(word_model, caplog):
    answer = ask("evaluate", model_path=word_model, dataset=ROWS, max_new_tokens=2)
    assert answer["num_samples"] == 4, answer
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == []


def test_the_figures_of_an_evaluation():
    def answer(text, truth="7", difficulty=1, is_cut=False):
        return Answer("q", truth, text, f" {truth}" in text, 5, is_cut, difficulty)

    rows = [
        [
            answer("3 + 4 = 7\nFinal Answer: 7"),
            answer("Final Answer: 7"),
            answer("3 + 4 = 9\nFinal Answer: 9"),
        ],
        [answer("Final Answer: 5", "8", 2), answer("nothing", "8", 2), answer("so", "8", 2, is_cut=True)],
    ]
    found = measure(rows)
    assert (
        found["accuracy"] == pytest.approx(1 / 3) and found["accuracy_low"] < 1 / 3 < found["accuracy_high"]
    )
    assert found["pass_at_k"]["3"] == 0.5 and found["majority_at_k"] == 0.5
    assert found["mean_absolute_error"] == pytest.approx((0 + 0 + 2 + 3) / 4)
    assert found["errors"] == {"calculation": 1, "reasoning": 1, "no_answer": 1, "truncated": 1}
    assert found["format_rate"] == pytest.approx(4 / 6) and found["accuracy_by_steps"] == {
        "1": pytest.approx(2 / 3),
        "2": 0,
    }


def test_the_schema_names_every_parameter_of_json():
    schema = RLTrainingTool().schema
    known = schema["function"]["parameters"]["properties"]
    assert schema["function"]["name"] == "rl_training" and json.dumps(schema)
    assert set(Train.model_fields) - {"custom_reward"} < set(known) and known["action"]["enum"][0] == "train"


def test_gsm8k_by_name_is_never_the_generated_problems(monkeypatch):
    def without_network(*_, **__):
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr(datasets, "load_dataset", without_network)
    answer = ask("load_dataset", dataset="gsm8k")
    assert (
        answer["status"] == "error"
        and answer["code"] == "data"
        and mentions(answer["message"], "hub", "split train")
    )


@pytest.mark.parametrize(
    ("more", "operations", "sampled"),
    [
        ({"algorithm": "sft"}, 6, 0),
        ({"kl_coef": 0.5}, 10, 8 * 16),
        ({"kl_coef": 0.0, "num_generations": 2}, 8, 2 * 16),
        ({"algorithm": "ppo", "kl_coef": 0.0, "num_generations": 1, "max_new_tokens": None}, 16, 128),
    ],
)
def test_a_training_is_estimated_by_the_speed_of_a_product(
    word_model, monkeypatch, more, operations, sampled
):
    """Where a product of 512² by 512² takes a millisecond. Half of the model's context is 128 tokens."""
    clock = itertools.count()
    monkeypatch.setattr(training.time, "perf_counter", lambda: next(clock) * 1e-3)
    given = {"model_name": word_model, "algorithm": "grpo", "num_epochs": 2, "max_new_tokens": 16}
    asked, texts = parse(Train, given | more), ["a" * 40, "a" * 80]
    tokens, parameters = 2 * (10 + 20 + 2 * sampled), read_model_shape(word_model).num_parameters
    seconds = training.estimate_seconds(asked, texts, training.num_generations(asked))
    assert seconds == pytest.approx(3 * operations * parameters * tokens / (2 * 512**3 / 1e-3))


def test_the_worst_answers_come_first(tmp_path):
    def answers(*texts):
        return [Answer("?", "7", text, text == "#### 7", 1, is_cut=False, difficulty=1) for text in texts]

    texts = ("#### 7", "#### 8"), ("#### 8",), ("#### 9",), ("#### 7",), ("nothing",)
    evaluation._write_worst(tmp_path / "worst.jsonl", [answers(*of_row) for of_row in texts])
    rows = map(json.loads, (tmp_path / "worst.jsonl").read_text().splitlines())
    assert [row["completion"] for row in rows] == ["nothing", "#### 9", "#### 8", "#### 8"]


def test_a_folder_that_cannot_be_made_is_refused_before_the_answers_are_sampled(
    word_model, tmp_path, monkeypatch
):
    (tmp_path / "taken").write_text("")
    monkeypatch.setattr(evaluation, "_answers", pytest.fail)
    answer = ask(
        "evaluate", model_path=str(word_model), dataset="generated", output_dir=str(tmp_path / "taken")
    )
    assert answer["status"] == "error" and "taken" in answer["message"]
