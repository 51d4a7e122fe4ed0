"""What the published step reward pays for, and what `only_if_correct`, `max_steps` and `floor` change.

    python benchmarks/step_reward.py [--seeds 1 2 3]

A small model learns sums in words from few demonstrations, then trains twice from there, on the same
problems: by `r_acc + 0.1·s` as it is published, where a wrong answer earns for its lines too, and with what
the tool's presets set. Both are measured on 100 problems that neither was trained on, one greedy answer each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import describe_machine
from toy import parse_arguments

from turnwise import RLTrainingTool
from turnwise.data.gsm8k import generate_problems, prompt_of
from turnwise.models.make import make_model
from turnwise.rl_tool import training
from turnwise.spec.package_tables import read_table

HERE = Path(__file__).parent
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
PROBLEMS: dict[str, Any] = {"steps": (1, 2), "largest": 9, "operations": "+"}
SAFE_REWARDS = read_table(training.__file__, "presets.yaml")["safe_rewards"]
CONFIGS: dict[str, dict[str, Any]] = {"published": {}, "presets": SAFE_REWARDS["step"]}
COLUMNS = ("accuracy", "average_steps", "average_length_tokens")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--demonstrations", type=int, default=1500)
    parser.add_argument("--prompts", type=int, default=240, help="16 a step, each answered 8 times")
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "step_reward.json")
    parser.add_argument("--problems", type=int, default=100, help="that are answered after training")
    parser.add_argument("--new-tokens", type=int, default=96)
    options = parse_arguments(parser, seeds=[1], demonstrations=16, prompts=16, problems=2, new_tokens=8)
    runs = [run(seed, options) for seed in options.seeds]
    means = {
        kind: {name: round(statistics.fmean(run[kind][name] for run in runs), 3) for name in runs[0][kind]}
        for kind in runs[0]
    }
    options.out.write_text(
        json.dumps({"machine": describe_machine(), "means": means, "runs": runs}, indent=2) + "\n"
    )
    print(json.dumps(means, indent=2))


def run(seed: int, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """The figures after imitation and after reinforcement by each reward."""
    rows = generate_problems(
        max(options.demonstrations, options.prompts) + options.problems, seed=seed, **PROBLEMS
    )
    tool, found = RLTrainingTool(), {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = [f"{prompt_of(row['question'])} {row['answer']} Final Answer:" for row in rows]
        make_model("tiny", folder / "model", texts, seed=seed, overrides=SIZES)
        common = {
            "use_lora": False,
            "batch_size": 16,
            "num_epochs": 1,
            "seed": seed,
            "use_tensorboard": False,
        }

        def ask(**asked: Any) -> dict[str, Any]:
            answer = tool.run_dict(asked)
            return answer if answer["status"] == "success" else sys.exit(answer["message"])

        def measure(model: Path) -> dict[str, float]:
            answer = ask(
                action="evaluate",
                model_path=str(model),
                dataset=rows[-options.problems :],
                max_new_tokens=options.new_tokens,
            )
            return {name: answer[name] for name in COLUMNS}

        shown = {"dataset": rows[: options.demonstrations], "learning_rate": 3e-3}
        ask(
            action="train",
            algorithm="sft",
            model_name=str(folder / "model"),
            output_dir=str(folder / "sft"),
            **shown,
            **common,
        )
        found["imitation"] = measure(folder / "sft")
        for kind, config in CONFIGS.items():
            trained = ask(
                action="train",
                algorithm="grpo",
                model_name=str(folder / "sft"),
                output_dir=str(folder / kind),
                dataset=rows[: options.prompts],
                reward_type="step",
                reward_config=config,
                learning_rate=options.learning_rate,
                kl_coef=0.0,
                max_new_tokens=options.new_tokens,
                **common,
            )
            found[kind] = measure(folder / kind) | {"average_reward": trained["average_reward"]}
            print(seed, kind, found, flush=True)
    return found


if __name__ == "__main__":
    main()
