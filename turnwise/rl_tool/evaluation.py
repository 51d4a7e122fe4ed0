"""The action `evaluate`. A model answers the prompts of rows with known true answers, and its answers are
measured."""

import json
import math
import operator
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from turnwise.data.answers import answer_key, answer_of, stated_answer
from turnwise.data.checkers import are_correct, check_checker
from turnwise.data.math_rewards import has_format, num_steps
from turnwise.data.quantities import TOLERANCE
from turnwise.errors import ConfigError, DataError
from turnwise.examine.examined import examine
from turnwise.model_files.folder import base_of_adapter, check_model
from turnwise.model_files.hub import local_path
from turnwise.pipelines.collect import Collection
from turnwise.pipelines.evaluate import EpisodeResult, Score
from turnwise.rl_tool import loaded_rows as data
from turnwise.rl_tool.parameters import Evaluate
from turnwise.rl_tool.training import new_tokens
from turnwise.trainer.trainer import Trainer
from turnwise.types import Group

NUM_WORST = 20
_EQUATION = re.compile(
    r"(-?(?<!\d)\d++(?:\.\d++)?)\s*+([-+*/×])\s*+(\d++(?:\.\d++)?)\s*+=\s*+(?:<<[^<>]*+>>\s*+)?(-?\d++(?:\.\d++)?)"
)
_OPERATIONS: dict[str, Callable[[float, float], float]]
_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "×": operator.mul}
_OPERATIONS["/"] = lambda a, b: a / b if b else float("nan")


class Answer(NamedTuple):
    """One answer to a row."""

    question: str
    ground_truth: str
    completion: str
    is_correct: bool
    num_tokens: int
    is_cut: bool
    difficulty: int
    """Steps of the row's own solution, 0 if unknown."""

    @property
    def error(self) -> str:
        """What is wrong: `truncated`, `no_answer`, `calculation` (a false equation) or `reasoning`; "" for a
        right answer."""
        if self.is_correct:
            return ""
        if answer_of(self.completion) is None and stated_answer(self.completion) is None:
            return "truncated" if self.is_cut else "no_answer"
        equations = _EQUATION.findall(self.completion)
        is_false = any(
            abs(_OPERATIONS[o](float(a), float(b)) - float(c)) > TOLERANCE for a, o, b, c in equations
        )
        return "truncated" if self.is_cut else "calculation" if is_false else "reasoning"

    @property
    def distance(self) -> float | None:
        """|answer − truth|, None if one of them isn't a number."""
        got, right = answer_of(self.completion), answer_of(self.ground_truth)
        return None if got is None or right is None else abs(got.value - right.value)


def evaluate(asked: Evaluate, datasets: Mapping[str, Any]) -> dict[str, Any]:
    """Measures the model's answers to rows, writes the worst ones to a file, and returns the entries of the
    tool's answer."""
    check_checker(asked.checker)
    check_model(asked.model_path)
    base = base_of_adapter(asked.model_path)
    if asked.use_lora and base is None:
        raise ConfigError(
            f"use_lora: {asked.model_path} holds no LoRA adapter; leave it out, or name an adapter's folder"
        )
    model = base if base is not None and asked.use_lora is False else asked.model_path
    name, rows, _ = loaded = data.load(asked, "rl", datasets, split="test", number=100)
    data.require_truths(loaded, ["ground_truth"])
    model_folder = local_path(asked.model_path)
    worst = Path(asked.output_dir or Path(model_folder if model_folder.is_dir() else "output", "evaluation"))
    worst.mkdir(parents=True, exist_ok=True)
    TemporaryDirectory(
        dir=worst
    ).cleanup()  # A folder that can't be written is refused before the answers are sampled.
    started = time.perf_counter()
    groups = _answers(model, asked, rows)
    seconds = time.perf_counter() - started
    answers = [answers for group in groups if (answers := _read(group, asked.checker))]
    if not answers:
        raise DataError(f"dataset {name}: no prompt was answered; they are too long for the model")
    measured = measure(answers)
    _write_worst(worst / "worst_samples.jsonl", answers)
    details = (
        {"details": [answer._asdict() for of_row in answers for answer in of_row]}
        if asked.return_details
        else {}
    )
    return {
        "model_path": asked.model_path,
        "uses_lora": base is not None and model != base,
        "dataset": name,
        "num_samples": len(answers),
        "k": asked.k,
        **measured,
        "time_per_sample_s": seconds / len(answers),
        "worst_samples": str(worst / "worst_samples.jsonl"),
        **details,
    }


def _answers(model: str, asked: Evaluate, rows: list[dict[str, Any]]) -> list[Group]:
    """The model's answers to the rows, one group per row, sampled as in a validation during training."""
    sampling = {
        "max_new_tokens": new_tokens(model, asked.max_new_tokens),
        "do_sample": asked.k > 1,
        **({"temperature": asked.temperature} if asked.k > 1 else {}),
    }
    trainer = Trainer(
        model=model,
        train_dataset=[{"prompt": "unused", "ground_truth": "0"}],
        eval_dataset=rows,
        reward_funcs=["accuracy"],
        seed=asked.seed,
        eval_steps=1,
        val_batch_size=len(rows) * asked.k,
        val_env_manager={
            "num_env_groups": min(len(rows), 64),
            "group_size": asked.k,
            "generating_args": sampling,
        },
        track_with=[],
        is_quiet=True,
    )
    from turnwise.assemble.saved import collect_rollouts

    class CollectedGroups(Collection):
        """Keeps the groups instead of writing them."""

        groups: list[Group]

        def play(
            self, scheduler: Any, num_batches: int, num_trajectories: int, begin_phase: Any = None
        ) -> None:
            self.groups = scheduler.get_batch(num_trajectories)

    collected = CollectedGroups(Path("rollouts.jsonl"))
    collect_rollouts(examine(trainer.config), collected, "val")
    return collected.groups


def _read(group: "Group", checker: str) -> list[Answer]:
    row = group.task.payload
    trajectories = [trajectory for trajectory in group.trajectories if trajectory.error is None]
    truths = [row["ground_truth"]] * len(trajectories)
    verdicts = are_correct([trajectory.turns[-1].text for trajectory in trajectories], truths, checker)
    return [
        Answer(
            question=str(row.get("question", row["prompt"])),
            ground_truth=str(row["ground_truth"]),
            completion=trajectory.turns[-1].text,
            is_correct=is_right,
            num_tokens=len(trajectory.turns[-1].response_ids),
            is_cut=trajectory.turns[-1].finish_reason == "length",
            difficulty=str(row.get("full_answer", "")).count("<<"),
        )
        for trajectory, is_right in zip(trajectories, verdicts, strict=True)
    ]


def measure(rows: Sequence[Sequence[Answer]]) -> dict[str, Any]:
    """The metrics of the answers to all rows."""
    answers = [answer for of_row in rows for answer in of_row]
    score = Score.of_tasks(
        [[EpisodeResult(a.is_correct, float(a.is_correct)) for a in of_row] for of_row in rows]
    )
    errors = Counter(answer.error for answer in answers if answer.error)
    levels = sorted({answer.difficulty for answer in answers})
    return {
        "accuracy": score.success,
        "accuracy_low": score.low,
        "accuracy_high": score.high,
        "average_reward": score.mean_score,
        "pass_at_k": {str(k): value for k, value in ({1: score.success} | dict(score.pass_at)).items()},
        "majority_at_k": _mean(_majority_is_correct(of_row) for of_row in rows),
        "mean_absolute_error": _mean(answer.distance for answer in answers if answer.distance is not None),
        "average_length_characters": _mean(len(answer.completion) for answer in answers),
        "average_length_tokens": _mean(answer.num_tokens for answer in answers),
        "average_steps": _mean(num_steps(answer.completion) for answer in answers),
        "format_rate": _mean(has_format(answer.completion) for answer in answers),
        "errors": dict(errors.most_common()),
        "accuracy_by_steps": {
            str(level): _mean(answer.is_correct for answer in answers if answer.difficulty == level)
            for level in levels
        },
    }


def _majority_is_correct(answers: Sequence[Answer]) -> bool:
    """Whether the most frequent answer to a row is right. If several answers are equally frequent, the first
    of them counts."""
    keys = [answer_key(answer.completion) for answer in answers]
    [(winner, _)] = Counter(keys).most_common(1)
    return answers[keys.index(winner)].is_correct


def _write_worst(file: Path, rows: Sequence[Sequence[Answer]]) -> None:
    """Writes the first wrong answer of each of the `NUM_WORST` worst rows. A row is worse if a smaller share
    of its answers is right or, at equal shares, if its first answer is farther from the truth. An answer
    without a number is the farthest."""

    def badness(answers: Sequence[Answer]) -> tuple[float, float]:
        distance = 0.0 if answers[0].is_correct else answers[0].distance
        return _mean(
            not answer.is_correct for answer in answers
        ) or 0.0, math.inf if distance is None else distance

    ordered = sorted(rows, key=badness, reverse=True)
    wrong = [
        next(a for a in of_row if not a.is_correct)
        for of_row in ordered
        if not all(a.is_correct for a in of_row)
    ]
    lines = [
        json.dumps({**answer._asdict(), "error": answer.error}, ensure_ascii=False)
        for answer in wrong[:NUM_WORST]
    ]
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _mean(values: Iterable[float]) -> float | None:
    listed = list(values)
    return sum(listed) / len(listed) if listed else None
