"""Reward functions that a config can name."""

from __future__ import annotations

import re
from collections.abc import Sequence

_GSM8K_ANSWER = re.compile(r"#### *(\$?-?\$?[0-9.,]+)")


def exact_match(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
    """1 where the completion is the row's `answer` but for the spaces around it, else 0.

    >>> exact_match(["4 ", "5"], ["4", "4"])
    [1.0, 0.0]
    """
    return [float(text.strip() == str(right).strip()) for text, right in zip(completions, answer, strict=True)]


def gsm8k(completions: Sequence[str], ground_truth: Sequence[str]) -> list[float]:
    """1 where the last number after `####` is the row's `ground_truth` (`reward_model.ground_truth` in the published schema).

    >>> gsm8k(["6 × 12 = 72\\n#### 72", "72"], ["72", "72"])
    [1.0, 0.0]
    """
    return [gsm8k_score(text, str(right)) for text, right in zip(completions, ground_truth, strict=True)]


def gsm8k_score(text: str, ground_truth: str) -> float:
    """Source: GSM8K's form of answers, `#### 1,234`; thousands separators, dollar signs and a final point don't count.

    >>> gsm8k_score("#### $1,234.", "1234")
    1.0
    """
    found = _GSM8K_ANSWER.findall(text)
    return float(bool(found) and _plain_number(found[-1]) == _plain_number(ground_truth))


def _plain_number(text: str) -> str:
    return text.replace(",", "").replace("$", "").strip().rstrip(".")
