"""Grade-school word problems: finds GSM8K's files, converts its rows, and generates problems in its
format."""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from turnwise.data.answers import stated_answer
from turnwise.errors import DataError
from turnwise.types import derive_seed

HUB_NAME = "openai/gsm8k:main"
GENERATED = "generated"
_FOLDERS = ("gsm8k", "data/gsm8k")
_FILES = ("main/{}-*.parquet", "{}-*.parquet", "{}.parquet", "main/{}.jsonl", "{}.jsonl")
_NAMES = ("Tom", "Anna", "Ben", "Mia", "Sam", "Lily")
_ITEMS = ("apples", "books", "coins", "cards", "shells")
_TEST_SHARE = 5  # one pair of operands in five is kept for the test split


def local_files(split: str, folder: str | Path | None = None) -> list[str]:
    """Files of a split in `folder`, by default in `./gsm8k` or, if that has none, in `./data/gsm8k`. Returns
    all that match the first fitting pattern of `_FILES` (`main/train-00000-of-00001.parquet` as on the hub,
    `train.jsonl`, …), else []."""
    folders = _FOLDERS if folder is None else (folder,)
    for path in map(Path, folders):
        for pattern in _FILES:
            files = sorted(path.glob(pattern.format(split)))
            if files:
                return [str(file) for file in files]
    return []


def prompt_of(question: str) -> str:
    """The user's message for a question, the same for SFT, RL and evaluation."""
    return f"Question: {question}\n\nLet's solve this step by step:"


def sft_row(row: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Makes a demonstration from a row's `messages` (and `tools`) as they are, else from `question` and
    `answer`, else from `prompt` and `completion`. Raises DataError if the row has none of these."""
    if "messages" in row:
        demonstration = {"messages": row["messages"]}
        if row.get("tools") is not None:
            demonstration["tools"] = row["tools"]
        return demonstration
    if {"question", "answer"} <= row.keys():
        rationale, _, final = str(row["answer"]).rpartition("####")
        prompt = prompt_of(row["question"])
        completion = f"{rationale.strip()}\nFinal Answer: {final.strip()}".strip()
    elif {"prompt", "completion"} <= row.keys():
        prompt = row["prompt"]
        completion = row["completion"]
    else:
        raise DataError(
            f"{place} has the columns {', '.join(row)}; sft needs question and answer, prompt and "
            "completion, or messages"
        )
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    answer = {"role": "assistant", "content": completion}
    return {"messages": [*messages, answer]}


def rl_row(row: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Makes `prompt` and `ground_truth` from `question` and `answer`. A row without these but with a `prompt`
    stays as it is. Raises DataError for any other row."""
    if {"question", "answer"} <= row.keys():
        solution = str(row["answer"])
        return {
            "prompt": prompt_of(row["question"]),
            "ground_truth": stated_answer(solution) or solution,
            "question": row["question"],
            "full_answer": row["answer"],
        }
    if "prompt" not in row:
        raise DataError(
            f"{place} has the columns {', '.join(row)}; rl needs question and answer, or prompt and "
            "ground_truth"
        )
    return dict(row)


def generate_problems(
    number: int,
    split: str = "train",
    seed: int = 0,
    steps: Sequence[int] = (1, 2, 3),
    largest: int = 20,
    operations: str = "+-",
) -> list[dict[str, str]]:
    """`number` different problems in GSM8K's format, `{"question", "answer"}` with `<<3+4=7>>` and `#### 7`.
    Problem i has `steps[i % len(steps)]` steps, each of which adds or takes away (`operations`) a number up
    to `largest`. No training problem has a step on the first two numbers of a test problem, in either order.
    Raises DataError if it finds fewer problems."""
    generator = random.Random(derive_seed("gsm8k", split, seed))
    problems: dict[str, dict[str, str]] = {}
    for _ in range(50 * number + 1000):
        if len(problems) == number:
            break
        num_steps = steps[len(problems) % len(steps)]
        problem = _problem(generator, num_steps, largest, operations, split == "test")
        if problem is not None:
            problems.setdefault(problem["question"], problem)
    if len(problems) < number:
        raise DataError(
            f"only {len(problems)} of {number} different problems of numbers up to {largest}; ask for fewer"
        )
    return list(problems.values())


def _problem(
    generator: random.Random,
    num_steps: int,
    largest: int,
    operations: str,
    is_test: bool,
) -> dict[str, str] | None:
    """A random problem. None if a training problem would have a step on held-out operands, the first step of
    a test problem would have operands that aren't held out, or no operation is possible."""
    name = generator.choice(_NAMES)
    item = generator.choice(_ITEMS)
    total = generator.randint(1, largest)
    sentences = [f"{name} has {total} {item}."]
    lines = []
    for number in range(num_steps):
        possible = operations if total > 1 else operations.replace("-", "")
        if not possible:
            return None
        operation = generator.choice(possible)
        limit = largest if operation == "+" else min(largest, total - 1)
        operand = generator.randint(1, limit)
        is_held_out = derive_seed("operands", *sorted((total, operand))) % _TEST_SHARE == 0
        if is_held_out is not is_test and (is_held_out or number == 0):
            return None
        opening = "Then " if number else ""
        if operation == "+":
            result = total + operand
            sentences.append(f"{opening}{name} finds {operand} more.")
        else:
            result = total - operand
            sentences.append(f"{opening}{name} gives {operand} away.")
        lines.append(f"{total} {operation} {operand} = <<{total}{operation}{operand}={result}>>{result}")
        total = result
    sentences.append(f"How many {item} does {name} have?")
    lines.append(f"#### {total}")
    return {"question": " ".join(sentences), "answer": "\n".join(lines)}
