"""When to call a tool, not only how: sums of numbers below five, which a tiny model can know, and products of
three digits, which it can't.

    python examples/tool_choice/choice.py [--out DIR] [--seed N]

1. Rows are drawn, half of them sums and half products, in the published schema of agents with tools. Products
are held out; the 25 sums are in training and validation alike, since what is learnt of them is not to
call.
2. A model with random weights and a tokenizer are made.
3. Supervised fine-tuning shows it conversations that call the calculator in seven of ten cases, needed or
not.
4. A shorter one teaches it the sums themselves, among conversations as before: for who can't do without it, a
call is never needless.

Then: `turnwise train examples/tool_choice/grpo.yaml`, whose reward takes a little off for a call that wasn't
needed. `env/sums/tool_calls` is the number of needless calls of an episode.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Mapping, Sequence
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
NUM_ROWS, NUM_HELD_OUT = 20_000, 1_000
SHARE_CALLED = 0.7
BELOW = 5
"""The terms of a sum are smaller."""
NUM_LEARNT_BY_HEART = 3_000
"""Demonstrations of sums without a call, and as many of the others, in the second fine-tuning. In the first
one the answers of sums are one token in a thousand: the model then was right in half of those that it
answered by itself."""
SHARE_WRONG = 0.5
"""Demonstrations of products whose call has one wrong digit."""
SCHEMA = FunctionTool(calculator).schema


def needless_call(
    completions: Sequence[Sequence[Mapping[str, Any]]], needs_call: Sequence[bool]
) -> list[float]:
    """-1 for an episode that calls a tool where none is needed, else 0."""
    scores = []
    for messages, needed in zip(completions, needs_call, strict=True):
        is_needless = not needed and any(message.get("tool_calls") for message in messages)
        scores.append(-1.0 if is_needless else 0.0)
    return scores


def questions(seed: int) -> list[str]:
    """Products, each different, and sums, in turn."""
    rng = random.Random(seed)
    products = rng.sample(range(900 * 900), NUM_ROWS // 2)
    drawn = []
    for number in products:
        drawn.append(f"{100 + number // 900} * {100 + number % 900}")
        drawn.append(f"{rng.randrange(BELOW)} + {rng.randrange(BELOW)}")
    return drawn


def row(question: str, index: int) -> dict[str, Any]:
    """A row in the published schema."""
    return {
        "data_source": "products" if "*" in question else "sums",
        "agent_name": "tool_agent",
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": calculator(question)},
        "needs_call": "*" in question,
        "extra_info": {
            "index": index,
            "need_tools_kwargs": True,
            "tools_kwargs": {"calculator": {"create_kwargs": {}}},
        },
    }


def known(question: str) -> dict[str, Any]:
    """A conversation that answers without a call."""
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": f"#### {calculator(question)}"},
    ]
    return {"messages": messages, "tools": [SCHEMA]}


def demonstration(question: str, rng: random.Random) -> dict[str, Any]:
    """A conversation that mostly calls the calculator, whether it is needed or not."""
    is_product = "*" in question
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    result = calculator(question)
    if rng.random() < SHARE_CALLED:
        asked = question
        if is_product and rng.random() < SHARE_WRONG:
            place = rng.choice([index for index, sign in enumerate(asked) if sign.isdigit()])
            digit = rng.choice([digit for digit in "123456789" if digit != asked[place]])
            asked = asked[:place] + digit + asked[place + 1 :]
        result = calculator(asked)
        call = {
            "id": "call00000",
            "type": "function",
            "function": {"name": "calculator", "arguments": {"expression": asked}},
        }
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append(
            {"role": "tool", "name": "calculator", "tool_call_id": "call00000", "content": result}
        )
    elif is_product:
        result = str(rng.randrange(10_000, 1_000_000))  # nobody knows it without the tool
    messages.append({"role": "assistant", "content": f"#### {result}"})
    return {"messages": messages, "tools": [SCHEMA]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/tool_choice"))
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings of sft.yaml")
    options = parser.parse_args()
    out = options.out
    start = out / "sft_model"
    require_new_or_link(start, "--out")
    asked = questions(options.seed)
    rows = [row(question, index) for index, question in enumerate(asked)]
    write(out / "val.jsonl", rows[:NUM_HELD_OUT])
    write(out / "train.jsonl", rows[NUM_HELD_OUT:])
    rng = random.Random(options.seed)
    shown = [demonstration(question, rng) for question in asked[NUM_HELD_OUT:]]
    write(out / "demonstrations.jsonl", shown)
    text = [json.dumps(SCHEMA) * 50, *(json.dumps(conversation) for conversation in shown[:2000])]
    made = make_model("tiny", out / "model", text, seed=options.seed)
    sums = [known(question) for question in asked[-2 * NUM_LEARNT_BY_HEART :] if "+" in question]
    write(out / "sums.jsonl", [*sums, *shown[:NUM_LEARNT_BY_HEART]])
    common = [f"output_dir={out}", f"seed={options.seed}", *options.overrides]
    caller = fine_tuned(made.folder, out / "demonstrations.jsonl", common)
    slower = ["exp_name=tool_choice_sums", "training_args.learning_rate=1.0e-3"]
    point_link(start, fine_tuned(caller, out / "sums.jsonl", [*common, *slower]), "--out")
    print(f"\nnext: turnwise train examples/tool_choice/grpo.yaml  (starts from {start})")


def fine_tuned(model: Path, rows: Path, overrides: Sequence[str]) -> Path:
    """The model after supervised fine-tuning on the rows, as sft.yaml has it."""
    own = [f"pretrain={model}", f"train_files=[{rows}]"]
    config, _ = load_config(HERE / "sft.yaml", [*own, *overrides], SFTConfig)
    return fine_tune(examine(config))


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    write_new_or_same(path, "".join(json.dumps(row) + "\n" for row in rows), "--out")


if __name__ == "__main__":
    sys.exit(exit_status(main))
