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
_THINGS = ("apples", "books", "coins", "cards", "shells")
_TEST_SHARE = 5  # one pair of operands in five is kept for the test split


def local_files(split: str, folder: str | Path | None = None) -> list[str]:
    """Files of a split in `folder`, by default in `./gsm8k` or, if that has none, in `./data/gsm8k`. Returns
    all that match the first fitting pattern of `_FILES` (`main/train-00000-of-00001.parquet` as on the hub,
    `train.jsonl`, …), else []."""
    folders = _FOLDERS if folder is None else (folder,)
    found = (sorted(Path(place).glob(pattern.format(split))) for place in folders for pattern in _FILES)
    return [str(file) for file in next(filter(None, found), [])]


def prompt_of(question: str) -> str:
    """The user's message for a question, the same for SFT, RL and evaluation."""
    return f"Question: {question}\n\nLet's solve this step by step:"


def sft_row(row: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Makes a demonstration from a row's `messages` (and `tools`) as they are, else from `question` and
    `answer`, else from `prompt` and `completion`. Raises DataError if the row has none of these."""
    if "messages" in row:
        return {
            name: row[name]
            for name in ("messages", "tools")
            if row.get(name) is not None or name == "messages"
        }
    if {"question", "answer"} <= row.keys():
        rationale, _, final = str(row["answer"]).rpartition("####")
        prompt, completion = (
            prompt_of(row["question"]),
            f"{rationale.strip()}\nFinal Answer: {final.strip()}".strip(),
        )
    elif {"prompt", "completion"} <= row.keys():
        prompt, completion = row["prompt"], row["completion"]
    else:
        raise DataError(
            f"{place} has the columns {', '.join(row)}; sft needs question and answer, prompt and "
            f"completion, or messages"
        )
    asked = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    return {"messages": [*asked, {"role": "assistant", "content": completion}]}


def rl_row(row: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Makes `prompt` and `ground_truth` from `question` and `answer`. A row without these but with a `prompt`
    stays as it is. Raises DataError for any other row."""
    if {"question", "answer"} <= row.keys():
        more = {"question": row["question"], "full_answer": row["answer"]}
        truth = stated_answer(str(row["answer"])) or str(row["answer"])
        return {"prompt": prompt_of(row["question"]), "ground_truth": truth, **more}
    if "prompt" not in row:
        raise DataError(
            f"{place} has the columns {', '.join(row)}; rl needs question and answer, or prompt and "
            f"ground_truth"
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
    drawn = random.Random(derive_seed("gsm8k", split, seed))
    found: dict[str, dict[str, str]] = {}
    for _ in range(50 * number + 1000):
        if len(found) == number:
            break
        problem = _problem(drawn, steps[len(found) % len(steps)], largest, operations, split == "test")
        if problem is not None:
            found.setdefault(problem["question"], problem)
    if len(found) < number:
        raise DataError(
            f"only {len(found)} of {number} different problems of numbers up to {largest}; ask for fewer"
        )
    return list(found.values())


def _problem(
    drawn: random.Random,
    num_steps: int,
    largest: int,
    operations: str,
    is_test: bool,
) -> dict[str, str] | None:
    """A random problem. None if a training problem would have a step on held-out operands, the first step of
    a test problem would have operands that aren't held out, or no operation is possible."""
    name, things, total = drawn.choice(_NAMES), drawn.choice(_THINGS), drawn.randint(1, largest)
    question, lines = [f"{name} has {total} {things}."], []
    for number in range(num_steps):
        possible = operations if total > 1 else operations.replace("-", "")
        if not possible:
            return None
        operation = drawn.choice(possible)
        other = drawn.randint(1, largest if operation == "+" else min(largest, total - 1))
        is_held_out = derive_seed("operands", *sorted((total, other))) % _TEST_SHARE == 0
        if is_held_out is not is_test and (is_held_out or number == 0):
            return None
        result = total + other if operation == "+" else total - other
        verb, way = ("finds", "more") if operation == "+" else ("gives", "away")
        question.append(f"{'Then ' if number else ''}{name} {verb} {other} {way}.")
        lines.append(f"{total} {operation} {other} = <<{total}{operation}{other}={result}>>{result}")
        total = result
    question.append(f"How many {things} does {name} have?")
    return {"question": " ".join(question), "answer": "\n".join([*lines, f"#### {total}"])}
