"""Reward functions that a config can name."""

from __future__ import annotations

from collections.abc import Sequence


def exact_match(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
    """1 where the completion is the row's `answer` but for the spaces around it, else 0.

    >>> exact_match(["4 ", "5"], ["4", "4"])
    [1.0, 0.0]
    """
    return [float(text.strip() == str(right).strip()) for text, right in zip(completions, answer, strict=True)]
