"""Rewards for answers to mathematical problems."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from inspect import Signature, signature
from typing import Any, Literal

from turnwise.data.answers import states_answer
from turnwise.data.checkers import Checker, are_correct
from turnwise.data.truths import check_truth, given_truths, needs_truth
from turnwise.errors import ConfigError, nearest

FORMULAS = {
    "accuracy": "r = 1[a = a*]",
    "length_penalty": "r = r_acc − penalty_weight·max(0, l − max_length)",
    "step": "r = r_acc + step_bonus·s",
    "format": "r = 1[the last line states an answer]",
    "combined": "r = Σ w_i·r_i",
}
"""The formula of each reward by its registered name."""

_TRUTHS = ("ground_truth", "answer")
"""The columns of a row's true answer; the first that a row has counts."""


def num_steps(text: str) -> int:
    """Number of steps in a text: its non-blank lines before the last line that states an answer, or all if no
    line does.

    >>> num_steps("3 + 4 = 7\\n7 - 2 = 5\\nFinal Answer: 5")
    2
    """
    lines = [line for line in text.splitlines() if line.strip()]
    for number in reversed(range(len(lines))):
        if states_answer(lines[number]):
            return number
    return len(lines)


def has_format(text: str) -> bool:
    """Whether the last line that isn't blank states an answer."""
    return states_answer(text.strip().rpartition("\n")[2])


@needs_truth(*_TRUTHS)
def accuracy(
    completions: Sequence[str],
    ground_truth: Any = None,
    answer: Any = None,
    *,
    checker: Checker = "text",
) -> list[float]:
    """r = 1[a = a*], where a is the completion's answer and a* the value of the column `ground_truth` or,
    without this column, of `answer`. `checker` says who compares them: the text reader (`data.answers`), or
    also the package math-verify. Raises ConfigError if the rows have neither column, NotAvailableError if the
    package isn't installed."""
    truths = given_truths(ground_truth, answer)
    return [float(is_right) for is_right in are_correct(completions, truths, checker)]


@needs_truth(*_TRUTHS)
def length_penalty(
    completions: Sequence[str],
    ground_truth: Any = None,
    answer: Any = None,
    *,
    max_length: int = 1024,
    penalty_weight: float = 0.001,
    length_unit: Literal["characters", "tokens"] = "characters",
    tokenizer: str | None = None,
    only_if_correct: bool = False,
    floor: float | None = None,
    checker: Checker = "text",
) -> list[float]:
    """r = r_acc − penalty_weight·max(0, l − max_length), where r_acc is the `accuracy` and l the length in
    characters, or in tokens of the model folder `tokenizer`. With `only_if_correct` a wrong answer has no
    penalty. No reward is below `floor`."""
    lengths = [_length(text, length_unit, tokenizer) for text in completions]
    penalties = [-penalty_weight * max(0, length - max_length) for length in lengths]
    right = accuracy(completions, ground_truth, answer, checker=checker)
    return _extended(right, penalties, only_if_correct, floor)


@needs_truth(*_TRUTHS)
def step(
    completions: Sequence[str],
    ground_truth: Any = None,
    answer: Any = None,
    *,
    step_bonus: float = 0.1,
    max_steps: int | None = None,
    only_if_correct: bool = False,
    floor: float | None = None,
    checker: Checker = "text",
) -> list[float]:
    """r = r_acc + step_bonus·min(s, max_steps), where r_acc is the `accuracy` and s the number of steps
    (`num_steps`). With `only_if_correct` a wrong answer gets no bonus. No reward is below `floor`."""
    counts = [num_steps(text) for text in completions]
    if max_steps is not None:
        counts = [min(count, max_steps) for count in counts]
    bonuses = [step_bonus * count for count in counts]
    right = accuracy(completions, ground_truth, answer, checker=checker)
    return _extended(right, bonuses, only_if_correct, floor)


def _extended(
    right: Sequence[float],
    extra: Sequence[float],
    only_if_correct: bool,
    floor: float | None,
) -> list[float]:
    rewards = []
    for reward, addend in zip(right, extra, strict=True):
        is_extended = bool(reward) or not only_if_correct
        rewards.append(reward + (addend if is_extended else 0.0))
    if floor is None:
        return rewards
    return [max(floor, reward) for reward in rewards]


def format_reward(completions: Sequence[str]) -> list[float]:
    """r = 1[the last line states an answer]."""
    return [float(has_format(text)) for text in completions]


def combined(
    completions: Sequence[str],
    ground_truth: Any = None,
    answer: Any = None,
    *,
    weights: Mapping[str, float] | None = None,
    **arguments: Any,
) -> list[float]:
    """r = Σ w_i·r_i over the rewards in `weights`, by default accuracy 1, length_penalty 0.5, step 0.3. Each
    reward gets the `arguments` that it has parameters for. Raises ConfigError if `weights` names an unknown
    reward."""
    total = [0.0] * len(completions)
    weights = weights or {"accuracy": 1.0, "length_penalty": 0.5, "step": 0.3}
    for name, weight in weights.items():
        if name not in PARTS:
            raise ConfigError(f"weights: {name!r} isn't one of {', '.join(PARTS)}.{nearest(name, PARTS)}")
        part = PARTS[name]
        parameters = part.__kwdefaults__ or ()
        options = {key: value for key, value in arguments.items() if key in parameters}
        columns = () if part is format_reward else (ground_truth, answer)
        rewards = part(completions, *columns, **options)
        total = [sum_ + weight * reward for sum_, reward in zip(total, rewards, strict=True)]
    return total


PARTS: dict[str, Callable[..., list[float]]] = {
    "accuracy": accuracy,
    "length_penalty": length_penalty,
    "step": step,
    "format": format_reward,
}
"""The rewards that `combined` can add up, by their registered names."""
_OPTIONS = {
    p.name: p
    for part in PARTS.values()
    for p in signature(part).parameters.values()
    if p.kind is p.KEYWORD_ONLY
}
_OWN = [p for p in signature(combined).parameters.values() if p.kind is not p.VAR_KEYWORD]
# Gives `combined` the parameters of its parts, so that callers can refuse wrong arguments and pass no other
# columns.
combined.__signature__ = Signature([*_OWN, *_OPTIONS.values()])  # type: ignore[attr-defined]


def _check_combined(row: Mapping[str, Any]) -> None:
    """`row` has the arguments too. The format alone needs no true answer."""
    weights = row.get("weights")
    if not isinstance(weights, Mapping) or set(weights) - {"format"}:
        check_truth(row, _TRUTHS)


combined.check_row = _check_combined  # type: ignore[attr-defined]


def _length(text: str, unit: str, tokenizer: str | None) -> int:
    if unit == "characters":
        return len(text)
    if unit != "tokens" or tokenizer is None:
        raise ConfigError(
            f"length_unit {unit!r}: it is characters, or tokens with `tokenizer`, the folder of a model"
        )
    return len(_tokenizer(tokenizer)(text, add_special_tokens=False)["input_ids"])


@lru_cache(maxsize=4)
def _tokenizer(folder: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)
