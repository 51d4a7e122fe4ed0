"""Reads the action from the text of a response, and writes an action as a response."""

import asyncio
import re

from turnwise.envs.pattern_program import FLAGS
from turnwise.envs.pattern_search import is_cheap, search
from turnwise.errors import ConfigError

ANSWERS = ("{action}", "<answer>{action}</answer>", "<think></think><answer>{action}</answer>")
"""Templates that turn an action into a response. The first from which `action_pattern` reads the same action
is used."""
_THINKING_TAG = re.compile(r"<(/?)think>", re.IGNORECASE)


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """A compiled `action_pattern`: `.` matches newlines, and case doesn't matter. Raises ConfigError if it
    isn't valid."""
    try:
        return re.compile(pattern, FLAGS)
    except re.error as error:
        raise ConfigError(f"action_pattern {pattern!r} isn't a regular expression: {error}") from error


def without_thoughts(text: str) -> str | None:
    """The text outside think blocks; None if a block is opened and never closed.

    Some chat templates open the block in the prompt, so text before a lone `</think>` is inside a block, too.

    >>> without_thoughts("<think>Left?</think> Right")
    ' Right'
    >>> without_thoughts("Left? No.</think>Right"), without_thoughts("<think>Left or")
    ('Right', None)
    """
    if "think>" not in text.lower():
        return text
    spoken: list[str] = []
    position = 0
    is_inside = False
    # One pass, since searching each block's end would take quadratic time for a text of unclosed blocks.
    for tag in _THINKING_TAG.finditer(text):
        closes = bool(tag.group(1))
        if closes and not is_inside:
            spoken.clear()
        elif not closes and not is_inside:
            spoken.append(text[position : tag.start()])
        is_inside = not closes
        position = tag.end()
    if is_inside:
        return None
    return "".join([*spoken, text[position:]])


def parse_action(text: str, pattern: str | None) -> str | None:
    """The stripped action in a response, None if there is none.

    The action is the last group of the first match of `pattern` outside think blocks; without groups, the
    whole match; without a pattern, all text outside think blocks. A pattern that contains `<think>` is
    matched against the whole text. A search that takes more than a second of computing finds no action
    (`pattern_search`).

    >>> parse_action("<think><answer>Up</answer>?</think> <Answer> Left </Answer>", r"<answer>(.*?)</answer>")
    'Left'
    """
    spoken: str | None = text
    if pattern is None or "<think>" not in pattern.lower():
        spoken = without_thoughts(text)
    if spoken is None:
        return None
    if pattern is None:
        return spoken.strip() or None
    compile_pattern(pattern)
    groups = search(pattern, spoken)
    if groups is None:
        return None
    return (groups[-1] or "").strip() or None


async def read_action(text: str, pattern: str | None) -> str | None:
    """Like `parse_action`. A search that may take long keeps no other episode waiting."""
    if pattern is None or is_cheap(pattern, text):
        return parse_action(text, pattern)
    return await asyncio.to_thread(parse_action, text, pattern)


def as_answer(action: str, pattern: str | None) -> str | None:
    """A response from which `pattern` reads the action; None if no template of `ANSWERS` fits. If the pattern
    already finds an action in `action`, the response is `action` unchanged.

    >>> as_answer("Right", r"<answer>(.*?)</answer>"), as_answer("Up", None), as_answer("Up", "[0-9]+")
    ('<answer>Right</answer>', 'Up', None)
    """
    if pattern is not None and parse_action(action, pattern) is not None:
        return action
    for template in ANSWERS:
        text = template.replace("{action}", action)
        if parse_action(text, pattern) == action.strip():
            return text
    return None
