"""What a message has to name: a test pins the key, the value and the remedy, not the sentence around them."""

from __future__ import annotations

import re
from collections.abc import Iterable


def says(*parts: str) -> str:
    """A regular expression for a line that has all of these parts, in any order, each as whole words.

    >>> says("top_k", "257")
    '(?=.*\\\\btop_k\\\\b)(?=.*\\\\b257\\\\b)'
    """
    return "".join(f"(?=.*{_bounded(part)})" for part in parts)


def mentions(text: str | Iterable[str], *parts: str) -> bool:
    """Whether one line of a text, or of several, has all of these parts.

    >>> mentions("pg_clip: got 3.\\nseed: got 4.", "seed", "4")
    True
    >>> mentions("pg_clip: got 3.\\nseed: got 4.", "seed", "3")
    False
    """
    lines = text if isinstance(text, str) else "\n".join(text)
    return re.search(says(*parts), lines) is not None


def _bounded(part: str) -> str:
    """A part that begins or ends with a letter or a digit is found as whole words: `pg_clip` isn't in
    `pg_clip_low`."""
    start = r"\b" if re.match(r"\w", part) else ""
    end = r"\b" if re.search(r"\w$", part) else ""
    return start + re.escape(part) + end
