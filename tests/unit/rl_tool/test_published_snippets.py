"""The calls of the published snippets, with a local model: what a reader copies runs.

`Qwen/Qwen3-0.6B` stands for a folder: the test puts the tiny model where that name leads to.
"""

from __future__ import annotations

import json
import re
from typing import List  # noqa: UP035  # as published

import pytest
from messages import says
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from turnwise import RLTrainingTool
from turnwise.data.gsm8k import generate_problems


@pytest.fixture(autouse=True)
def published_name(word_model, tmp_path):
    (tmp_path / "Qwen").mkdir()
    (tmp_path / "Qwen" / "Qwen3-0.6B").symlink_to(word_model)


def custom_reward_function(
    completions: List[str],  # noqa: UP006
    **kwargs,
) -> List[float]:  # noqa: UP006
    ground_truths = kwargs.get("ground_truth", [])
    rewards = []
    for completion, truth in zip(completions, ground_truths):  # noqa: B905
        reward = 0.0
        numbers = re.findall(r"-?\d+\.?\d*", completion)
        if numbers:
            try:
                pred = float(numbers[-1])
                truth_num = float(truth)
                error = abs(pred - truth_num)
                if error < 0.01:
                    reward = 1.0
                elif error < 1.0:
                    reward = 0.8
                elif error < 5.0:
                    reward = 0.5
                if "step" in completion.lower() or "=" in completion:
                    reward += 0.1
            except ValueError:
                reward = 0.0
        rewards.append(min(reward, 1.0))
    return rewards


def test_the_calls_of_the_pipeline_class_take_gsm8k_from_the_folder(tmp_path):
    """Without `dataset` and `max_samples` they train on all rows, and a folder in the hub's layout keeps them
    few."""
    (tmp_path / "gsm8k").mkdir()
    for split in ("train", "test"):
        lines = [json.dumps(row) + "\n" for row in generate_problems(2, split)]
        (tmp_path / "gsm8k" / f"{split}.jsonl").write_text("".join(lines))
    rl_tool, model = RLTrainingTool(), "Qwen/Qwen3-0.6B"
    for algorithm in ("sft", "grpo"):
        asked = {
            "action": "train",
            "algorithm": algorithm,
            "model_name": model,
            "output_dir": f"./models/{algorithm}",
        }
        model = json.loads(rl_tool.run({**asked, "num_epochs": 1, "batch_size": 2, "use_lora": True}))[
            "output_dir"
        ]
        asked = {"action": "evaluate", "model_path": model, "max_samples": 2, "use_lora": True}
        evaluation = json.loads(rl_tool.run(asked))
        assert evaluation["status"] == "success" and evaluation["dataset"] == "gsm8k", evaluation
        assert evaluation["num_samples"] == 2 and evaluation["uses_lora"] and 0 <= evaluation["accuracy"] <= 1


def test_the_quick_start_runs_and_its_second_run_is_refused(capsys):
    rl_tool = RLTrainingTool()
    sft = {
        "action": "train",
        "algorithm": "sft",
        "model_name": "Qwen/Qwen3-0.6B",
        "output_dir": "./models/quick_test_sft",
    }
    sft |= {"max_samples": 10, "num_epochs": 1, "batch_size": 2, "use_lora": True}
    sft_result = json.loads(rl_tool.run(sft))
    assert sft_result["status"] == "success", sft_result
    assert sft_result["dataset"] == "generated" and sft_result["num_steps"] == 5
    said, _, trained = capsys.readouterr().out.partition("run folder")
    assert re.search(says("generated, 10 rows"), said) and trained
    grpo = sft | {"algorithm": "grpo", "output_dir": "./models/grpo_model", "max_samples": 5}
    grpo_result = json.loads(rl_tool.run(grpo))
    assert grpo_result["status"] == "success", grpo_result
    assert grpo_result["num_steps"] == 3 and grpo_result["effective_batch_size"] == 16
    assert 0 < grpo_result["trainable_parameters"] < grpo_result["total_parameters"]
    assert isinstance(grpo_result["kl"], float) and isinstance(grpo_result["average_reward"], float)
    evaluate = {
        "action": "evaluate",
        "model_path": "./models/grpo_model",
        "max_samples": 10,
        "use_lora": True,
    }
    eval_result = json.loads(rl_tool.run(evaluate))
    assert eval_result["status"] == "success", eval_result
    assert (
        isinstance(eval_result["accuracy"], float)
        and eval_result["num_samples"] == 10
        and eval_result["uses_lora"]
    )

    again = json.loads(rl_tool.run(grpo))
    assert again["status"] == "error" and again["code"] == "exists" and "overwrite" in again["hint"]

    # The export, as published.
    base_model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
    model = PeftModel.from_pretrained(base_model, "./models/grpo_model")
    merged_model = model.merge_and_unload()
    merged_model.save_pretrained("./models/merged_model")
    tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-0.6B")
    tokenizer.save_pretrained("./models/merged_model")
    merged = RLTrainingTool().run_dict(
        {"action": "evaluate", "model_path": "./models/merged_model", "max_samples": 2}
    )
    assert merged["status"] == "success", merged


def test_the_custom_reward():
    asked = {
        "action": "train",
        "algorithm": "grpo",
        "model_name": "Qwen/Qwen3-0.6B",
        "output_dir": "./models/custom",
    }
    asked |= {"max_samples": 2, "num_epochs": 1, "batch_size": 2, "num_generations": 4, "max_new_tokens": 16}
    result = RLTrainingTool().run_dict(asked | {"custom_reward": custom_reward_function})
    assert result["status"] == "success", result
    assert "rollout/reward/custom_reward_function" in result["metrics"]
