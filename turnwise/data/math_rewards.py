"""Rewards for answers to mathematical problems, and functions that read the answer from a text."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from inspect import Signature, signature
from typing import Any, Literal, NamedTuple

from turnwise.data.truths import check_truth, needs_truth
from turnwise.errors import ConfigError, nearest

TOLERANCE = 1e-4
"""Numbers that differ by less than this are the same answer."""
FORMULAS = {
    "accuracy": "r = 1[a = a*]",
    "length_penalty": "r = r_acc − penalty_weight·max(0, l − max_length)",
    "step": "r = r_acc + step_bonus·s",
    "format": "r = 1[the last line states an answer]",
    "combined": "r = Σ w_i·r_i",
}
"""The formula of each reward by its registered name."""

_MARKER = re.compile(
    r"(?:final answer|the answer is|\banswer(?=\s*[:：=])|\btherefore\b|答案是?|####)\s*(?:is\b)?[\s:：=,*]*", re.I
)
_BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")
_NUMBER = re.compile(
    r"(?P<sign>(?<![\d.)])-)?\s?[$€£¥₹]?\s?(?P<sign2>(?<![\d.)])-)?"
    r"(?P<number>\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?(?:e[-+]?\d+)?|\.\d+)"
    r"(?:\s*/\s*(?P<under>\d+(?:\.\d+)?))?\s*(?P<percent>%|percent)?"
)
_ONLY_NUMBER = re.compile(rf"[\s(]*{_NUMBER.pattern}[\s.)]*(?:\s[a-z][a-z\s./]*|[a-z]{{2,}})?")
"""A number, perhaps in parentheses, perhaps followed by words such as a unit."""
_UNIT = re.compile(r"\\(?:text|mathrm|mbox)\s*\{([^{}]*)\}")
_SIGNS = re.compile(r"\\(?=[%$])|\\[,;! ]|\*|(?<=\d)\$$|^\s*\$(?=.*\$\s*$)")
_FRACTION = re.compile(r"\\[dt]?frac\s*\{\s*([^{}]+?)\s*\}\s*\{\s*([^{}]+?)\s*\}")


_TRUTHS = ("ground_truth", "answer")
"""The columns of a row's true answer; the first that a row has counts."""


class Quantity(NamedTuple):
    """A number that a text states. For 50% the value is 50."""

    value: float
    is_percent: bool = False


def stated_answer(text: str) -> str | None:
    """The last answer that a text states: the rest of the line after `Final Answer:`, `the answer is`, `Answer:`, `Therefore`,
    `####` or their Chinese form, or the content of a `\\boxed{}`. None if it states none.

    >>> stated_answer("The answer is 3. No!\\nFinal Answer: 3 + 4 = 7")
    '3 + 4 = 7'
    """
    found = max([*_MARKER.finditer(text), *_BOXED.finditer(text)], key=lambda match: match.start(), default=None)
    if found is None:
        return None
    return (found[1] if found.re is _BOXED else text[found.end() :].partition("\n")[0]).strip() or None


def read_number(text: str, is_last: bool = False) -> Quantity | None:
    """The first number after the last `=` of a text; with `is_last`, the text's last number. Thousands separators, currencies,
    percents, fractions and LaTeX are understood.

    >>> read_number("48/2 + 1 = $1,234.50").value, read_number(r"\\frac{1}{2}").value, read_number("50%").is_percent
    (1234.5, 0.5, True)
    """
    plain = _FRACTION.sub(r"\1/\2", text.rpartition("=")[2] if not is_last else text)
    plain = plain.replace("−", "-").replace("{,}", ",").replace("\\", "").replace("*", "")
    found = [match for match in _NUMBER.finditer(plain) if match["under"] is None or float(match["under"])]
    if not found:
        return None
    match = found[-1 if is_last else 0]
    value = float(match["number"].replace(",", "")) / float(match["under"] or 1)
    if not math.isfinite(value):  # hundreds of digits
        return None
    return Quantity(-value if match["sign"] or match["sign2"] else value, match["percent"] is not None)


def answer_of(text: str) -> Quantity | None:
    """The number in the answer that a text states; the last number of the text if it states no answer."""
    stated = stated_answer(text)
    return read_number(text, is_last=True) if stated is None else read_number(stated)


def is_correct(completion: str, truth: object) -> bool:
    """Whether the completion's answer equals the true one: by value if the true one is a number, else as text.

    >>> is_correct("Final Answer: 3 + 4 = 7", "7"), is_correct("It is 1,000 dollars", 1000), is_correct("#### 3", "7")
    (True, True, False)
    """
    text = stated_answer(str(truth)) or str(truth).strip()
    right, got = read_number(text), answer_of(completion)
    if right is None or not _is_number(text):
        return _folded(stated_answer(completion) or completion) == _folded(text)
    if got is None:
        return False
    # If only one of the two is a percentage, 50% counts as 50 and as 0.5.
    share = 1.0 if got.is_percent == right.is_percent else 0.01 if right.is_percent else 100.0
    return any(abs(got.value - value) < TOLERANCE for value in (right.value, right.value * share))


def _is_number(text: str) -> bool:
    """Whether a text is one number after its last `=`, not a formula such as `3x`, `(1, 2)` or a root."""
    plain = _SIGNS.sub("", _FRACTION.sub(r"\1/\2", _UNIT.sub(r" \1", text.rpartition("=")[2])))
    return _ONLY_NUMBER.fullmatch(plain.replace("{,}", ",").replace("−", "-").strip()) is not None


def _folded(text: str) -> str:
    return text.strip().strip(".").casefold()


def num_steps(text: str) -> int:
    """Number of steps in a text: its non-blank lines before the last line that states an answer, or all if no line does.

    >>> num_steps("3 + 4 = 7\\n7 - 2 = 5\\nFinal Answer: 5")
    2
    """
    lines = [line for line in text.splitlines() if line.strip()]
    return next((i for i in reversed(range(len(lines))) if stated_answer(lines[i]) is not None), len(lines))


def has_format(text: str) -> bool:
    """Whether the last line that isn't blank states an answer."""
    return stated_answer(text.strip().rpartition("\n")[2]) is not None


@needs_truth(*_TRUTHS)
def accuracy(completions: Sequence[str], ground_truth: Any = None, answer: Any = None) -> list[float]:
    """r = 1[a = a*], where a is the completion's answer and a* the value of the column `ground_truth` or, without this column,
    of `answer`. Raises ConfigError if the rows have neither."""
    truths = ground_truth if ground_truth is not None else answer
    if truths is None:
        raise ConfigError("the rows have no column ground_truth or answer, with which this reward compares; add one")
    return [float(is_correct(text, truth)) for text, truth in zip(completions, truths, strict=True)]


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
) -> list[float]:
    """r = r_acc − penalty_weight·max(0, l − max_length), where r_acc is the `accuracy` and l the length in characters, or in
    tokens of the model folder `tokenizer`. With `only_if_correct` a wrong answer has no penalty. No reward is below `floor`."""
    lengths = [_length(text, length_unit, tokenizer) for text in completions]
    more = [-penalty_weight * max(0, length - max_length) for length in lengths]
    return _extended(accuracy(completions, ground_truth, answer), more, only_if_correct, floor)


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
) -> list[float]:
    """r = r_acc + step_bonus·min(s, max_steps), where r_acc is the `accuracy` and s the number of steps (`num_steps`). With
    `only_if_correct` a wrong answer gets no bonus. No reward is below `floor`."""
    stated = [num_steps(text) for text in completions]
    more = [step_bonus * (s if max_steps is None else min(s, max_steps)) for s in stated]
    return _extended(accuracy(completions, ground_truth, answer), more, only_if_correct, floor)


def _extended(right: Sequence[float], more: Sequence[float], only_if_correct: bool, floor: float | None) -> list[float]:
    rewards = [r + (m if r or not only_if_correct else 0.0) for r, m in zip(right, more, strict=True)]
    return rewards if floor is None else [max(floor, reward) for reward in rewards]


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
    """r = Σ w_i·r_i over the rewards in `weights`, by default accuracy 1, length_penalty 0.5, step 0.3. Each reward gets the
    `arguments` that it has parameters for. Raises ConfigError if `weights` names an unknown reward."""
    total = [0.0] * len(completions)
    for name, weight in (weights or {"accuracy": 1.0, "length_penalty": 0.5, "step": 0.3}).items():
        if name not in PARTS:
            raise ConfigError(f"weights: {name!r} isn't one of {', '.join(PARTS)}.{nearest(name, PARTS)}")
        part = PARTS[name]
        given = {key: value for key, value in arguments.items() if key in (part.__kwdefaults__ or ())}
        columns = (ground_truth, answer) if part is not format_reward else ()
        total = [sum_ + weight * r for sum_, r in zip(total, part(completions, *columns, **given), strict=True)]
    return total


PARTS: dict[str, Callable[..., list[float]]] = {
    "accuracy": accuracy,
    "length_penalty": length_penalty,
    "step": step,
    "format": format_reward,
}
"""The rewards that `combined` can add up, by their registered names."""
_OPTIONS = {p.name: p for part in PARTS.values() for p in signature(part).parameters.values() if p.kind is p.KEYWORD_ONLY}
_OWN = [p for p in signature(combined).parameters.values() if p.kind is not p.VAR_KEYWORD]
# Gives `combined` the parameters of its parts, so that callers can refuse wrong arguments and pass no other columns.
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
        raise ConfigError(f"length_unit {unit!r}: it is characters, or tokens with `tokenizer`, the folder of a model")
    return len(_tokenizer(tokenizer)(text, add_special_tokens=False)["input_ids"])


@lru_cache(maxsize=4)
def _tokenizer(folder: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)
