"""Products of three-digit numbers, which no tiny model learns, for an agent that learns to call the
calculator.

    python examples/products/products.py [--out DIR] [--seed N] [--without-tool]

1. Pairs of numbers are drawn; 1,000 of them are held out, and nothing is ever trained on them. Rows are in
the published schema
   of agents with tools (`agent_name`, `reward_model.ground_truth`, `extra_info`).
2. A model with random weights and a tokenizer are made.
3. Supervised fine-tuning shows it conversations in which most calls have one wrong digit. So it learns the
form of a call, and
   is right as rarely as its teacher.

Then: `turnwise train examples/products/grpo.yaml`. With --without-tool each call is replaced by its result,
and nothing has a tool: what the model learns then is what it can do by itself.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

from turnwise.assemble.sft import fine_tune
from turnwise.cli.main import exit_status
from turnwise.config import SFTConfig, load_config
from turnwise.examine.examined import examine
from turnwise.models.make import make_model
from turnwise.runtime.replaceable import point_link, require_new_or_link, write_new_or_same
from turnwise.tools.calculator import calculator
from turnwise.tools.function_tool import FunctionTool

HERE = Path(__file__).parent
NUM_HELD_OUT, NUM_ROWS = 1_000, 20_000
SHARE_WRONG = 0.75
"""Demonstrations whose call has one wrong digit."""
SCHEMA = FunctionTool(calculator).schema


def pairs(seed: int) -> list[tuple[int, int]]:
    """Different pairs of three-digit numbers."""
    drawn = random.Random(seed).sample(range(900 * 900), NUM_ROWS)
    return [(100 + number // 900, 100 + number % 900) for number in drawn]


def row(a: int, b: int, index: int, has_tool: bool) -> dict[str, Any]:
    """A row in the published schema."""
    return {
        "data_source": "products",
        "agent_name": "tool_agent" if has_tool else "single_turn_agent",
        "prompt": [{"role": "user", "content": f"{a} * {b}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(a * b)},
        "extra_info": {
            "index": index,
            "need_tools_kwargs": has_tool,
            "tools_kwargs": {"calculator": {"create_kwargs": {}}},
        },
    }


def demonstration(a: int, b: int, rng: random.Random, has_tool: bool) -> dict[str, Any]:
    """A conversation that asks the calculator, mostly with one wrong digit."""
    asked = f"{a} * {b}"
    if rng.random() < SHARE_WRONG:
        place = rng.choice([index for index, sign in enumerate(asked) if sign.isdigit()])
        asked = (
            asked[:place]
            + rng.choice([digit for digit in "123456789" if digit != asked[place]])
            + asked[place + 1 :]
        )
    result = calculator(asked)
    question = {"role": "user", "content": f"{a} * {b}"}
    answer = {"role": "assistant", "content": f"#### {result}"}
    if not has_tool:
        return {"messages": [question, answer]}
    call = {
        "id": "call00000",
        "type": "function",
        "function": {"name": "calculator", "arguments": {"expression": asked}},
    }
    called = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "calculator", "tool_call_id": "call00000", "content": result},
    ]
    return {"messages": [question, *called, answer], "tools": [SCHEMA]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/products"))
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--without-tool", action="store_true")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings of sft.yaml")
    options = parser.parse_args()
    out, has_tool, drawn = options.out, not options.without_tool, pairs(options.seed)
    start = out / "sft_model"
    require_new_or_link(start, "--out")
    rows = [row(a, b, index, has_tool) for index, (a, b) in enumerate(drawn)]
    write(out / "val.jsonl", rows[:NUM_HELD_OUT])
    write(out / "train.jsonl", rows[NUM_HELD_OUT:])
    rng = random.Random(options.seed)
    shown = [demonstration(a, b, rng, has_tool) for a, b in drawn[NUM_HELD_OUT:]]
    write(out / "demonstrations.jsonl", shown)
    text = [json.dumps(SCHEMA) * 50, *(json.dumps(conversation) for conversation in shown[:2000])]
    made = make_model("tiny", out / "model", text, seed=options.seed)
    paths = [f"pretrain={made.folder}", f"output_dir={out}", f"train_files=[{out / 'demonstrations.jsonl'}]"]
    config, _ = load_config(
        HERE / "sft.yaml", [*paths, f"seed={options.seed}", *options.overrides], SFTConfig
    )
    point_link(start, fine_tune(examine(config)), "--out")
    print(f"\nnext: turnwise train examples/products/grpo.yaml  (starts from {start})")


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    write_new_or_same(path, "".join(json.dumps(row) + "\n" for row in rows), "--out")


if __name__ == "__main__":
    sys.exit(exit_status(main))
