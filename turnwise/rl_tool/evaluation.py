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


def _quotient(a: float, b: float) -> float:
    return a / b if b else math.nan


_OPERATIONS: dict[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "×": operator.mul,
    "/": _quotient,
}


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
        if self.is_cut:
            return "truncated"
        if answer_of(self.completion) is None and stated_answer(self.completion) is None:
            return "no_answer"
        for a, operation, b, result in _EQUATION.findall(self.completion):
            value = _OPERATIONS[operation](float(a), float(b))
            if abs(value - float(result)) > TOLERANCE:
                return "calculation"
        return "reasoning"

    @property
    def distance(self) -> float | None:
        """|answer − truth|, None if one of them isn't a number."""
        answer = answer_of(self.completion)
        truth = answer_of(self.ground_truth)
        if answer is None or truth is None:
            return None
        return abs(answer.value - truth.value)


def evaluate(action: Evaluate, datasets: Mapping[str, Any]) -> dict[str, Any]:
    """Measures the model's answers to rows, writes the worst ones to a file, and returns the entries of the
    tool's answer."""
    check_checker(action.checker)
    check_model(action.model_path)
    base = base_of_adapter(action.model_path)
    if action.use_lora and base is None:
        raise ConfigError(
            f"use_lora: {action.model_path} holds no LoRA adapter; remove it, or name an adapter's folder"
        )
    model = action.model_path
    if base is not None and action.use_lora is False:
        model = base
    loaded = data.load(
        action,
        "rl",
        datasets,
        split="test",
        number=100,
    )
    data.require_truths(loaded, ["ground_truth"])
    worst_file = _output_folder(action) / "worst_samples.jsonl"
    started = time.perf_counter()
    groups = _answers(model, action, loaded.rows)
    seconds = time.perf_counter() - started
    rows = [_read(group, action.checker) for group in groups]
    rows = [answers for answers in rows if answers]
    if not rows:
        raise DataError(f"dataset {loaded.name}: no prompt was answered; they are too long for the model")
    metrics = measure(rows)
    _write_worst(worst_file, rows)
    result: dict[str, Any] = {
        "model_path": action.model_path,
        "uses_lora": base is not None and model != base,
        "dataset": loaded.name,
        "num_samples": len(rows),
        "k": action.k,
        **metrics,
        "time_per_sample_s": seconds / len(rows),
        "worst_samples": str(worst_file),
    }
    if action.return_details:
        result["details"] = [answer._asdict() for answers in rows for answer in answers]
    return result


def _output_folder(action: Evaluate) -> Path:
    """The folder of the worst answers. It is made, and refused if it can't be written, before the answers are
    sampled."""
    model_folder = local_path(action.model_path)
    default = Path("output")
    if model_folder.is_dir():
        default = model_folder
    folder = Path(action.output_dir or default / "evaluation")
    folder.mkdir(parents=True, exist_ok=True)
    TemporaryDirectory(dir=folder).cleanup()
    return folder


def _answers(
    model: str,
    action: Evaluate,
    rows: list[dict[str, Any]],
) -> list[Group]:
    """The model's answers to the rows, one group per row, sampled as in a validation during training."""
    sampling: dict[str, Any] = {
        "max_new_tokens": new_tokens(model, action.max_new_tokens),
        "do_sample": action.k > 1,
    }
    if action.k > 1:
        sampling["temperature"] = action.temperature
    trainer = Trainer(
        model=model,
        train_dataset=[{"prompt": "unused", "ground_truth": "0"}],
        eval_dataset=rows,
        reward_funcs=["accuracy"],
        seed=action.seed,
        eval_steps=1,
        val_batch_size=len(rows) * action.k,
        val_env_manager={
            "num_env_groups": min(len(rows), 64),
            "group_size": action.k,
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
            self,
            scheduler: Any,
            num_batches: int,
            num_trajectories: int,
            begin_phase: Any = None,
            on_played: Any = None,
        ) -> None:
            self.groups = scheduler.get_batch(num_trajectories)

    collection = CollectedGroups(Path("rollouts.jsonl"))
    collect_rollouts(examine(trainer.config), collection, "val")
    return collection.groups


def _read(group: "Group", checker: str) -> list[Answer]:
    row = group.task.payload
    turns = [trajectory.final_turn for trajectory in group.trajectories if trajectory.error is None]
    truths = [row["ground_truth"]] * len(turns)
    verdicts = are_correct([turn.text for turn in turns], truths, checker)
    return [
        Answer(
            question=str(row.get("question", row["prompt"])),
            ground_truth=str(row["ground_truth"]),
            completion=turn.text,
            is_correct=is_correct,
            num_tokens=len(turn.response_ids),
            is_cut=turn.finish_reason == "length",
            difficulty=str(row.get("full_answer", "")).count("<<"),
        )
        for turn, is_correct in zip(turns, verdicts, strict=True)
    ]


def measure(rows: Sequence[Sequence[Answer]]) -> dict[str, Any]:
    """The metrics of the answers to all rows."""
    tasks = []
    for answers_to_row in rows:
        tasks.append([EpisodeResult(a.is_correct, float(a.is_correct)) for a in answers_to_row])
    score = Score.of_tasks(tasks)
    pass_at = {1: score.success} | dict(score.pass_at)
    answers = [answer for answers_to_row in rows for answer in answers_to_row]
    distances = [answer.distance for answer in answers]
    errors = Counter(answer.error for answer in answers if answer.error)
    by_steps: dict[int, list[bool]] = {}
    for answer in sorted(answers, key=operator.attrgetter("difficulty")):
        by_steps.setdefault(answer.difficulty, []).append(answer.is_correct)
    return {
        "accuracy": score.success,
        "accuracy_low": score.low,
        "accuracy_high": score.high,
        "average_reward": score.mean_score,
        "pass_at_k": {str(k): value for k, value in pass_at.items()},
        "majority_at_k": _mean(map(_majority_is_correct, rows)),
        "mean_absolute_error": _mean(distance for distance in distances if distance is not None),
        "average_length_characters": _mean(len(answer.completion) for answer in answers),
        "average_length_tokens": _mean(answer.num_tokens for answer in answers),
        "average_steps": _mean(num_steps(answer.completion) for answer in answers),
        "format_rate": _mean(has_format(answer.completion) for answer in answers),
        "errors": dict(errors.most_common()),
        "accuracy_by_steps": {str(steps): _mean(verdicts) for steps, verdicts in by_steps.items()},
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
    lines = []
    for answers in sorted(rows, key=_badness, reverse=True):
        wrong = [answer for answer in answers if not answer.is_correct]
        if wrong:
            values = {**wrong[0]._asdict(), "error": wrong[0].error}
            lines.append(json.dumps(values, ensure_ascii=False) + "\n")
    file.write_text("".join(lines[:NUM_WORST]), encoding="utf-8")


def _badness(answers: Sequence[Answer]) -> tuple[float, float]:
    share_of_wrong = _mean(not answer.is_correct for answer in answers) or 0.0
    first = answers[0]
    distance = 0.0 if first.is_correct else first.distance
    if distance is None:
        distance = math.inf
    return share_of_wrong, distance


def _mean(values: Iterable[float]) -> float | None:
    numbers = list(values)
    if not numbers:
        return None
    return sum(numbers) / len(numbers)
