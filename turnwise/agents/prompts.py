"""From observations to chat messages."""

from __future__ import annotations

from string import Formatter
from typing import Any

from turnwise.errors import ConfigError, nearest
from turnwise.spec import STEP_PLACEHOLDERS, TURN_PLACEHOLDERS
from turnwise.types import Message, Observation


class EnvPrompt:
    """Writes the messages before each response: the system message and the rules first, then one user message a turn.

    `system_template` is used as it is, "" for none. `turn_template` is filled with `TURN_PLACEHOLDERS`; a brace of its own is
    written twice. What an environment returned is inserted as it is, braces and all. The environment's instruction
    opens the first user message, or stands where the template has `{env_instruction}`.

    Raises:
        ConfigError: `turn_template` has a placeholder that doesn't exist, or a lone brace.

    >>> prompt = EnvPrompt("", "Turn {turn_idx}: {observation}")
    >>> prompt.messages(Observation("{P}"), turn_idx=1, actions_left=9, max_response_length=8, env_instruction="Walk.")
    [{'role': 'user', 'content': 'Walk.\\nTurn 1: {P}'}]
    """

    def __init__(self, system_template: str, turn_template: str) -> None:
        self._system = system_template
        self._pieces = _parse(turn_template)
        self._shows_instruction = any(name == "env_instruction" for _, name in self._pieces)

    def messages(
        self,
        observation: Observation,
        *,
        turn_idx: int,
        actions_left: int,
        max_response_length: int,
        env_instruction: str = "",
        suffix: str = "",
    ) -> list[Message]:
        """What is added to the conversation before the response of turn `turn_idx`, which counts from 1."""
        values = {
            "observation": observation.text,
            "turn_idx": str(turn_idx),
            "actions_left": str(actions_left),
            "max_response_length": str(max_response_length),
            "env_instruction": env_instruction,
            "suffix": suffix,
        }
        text = "".join(literal + (values[name] if name else "") for literal, name in self._pieces)
        is_first = turn_idx == 1
        if is_first and env_instruction and not self._shows_instruction:
            text = f"{env_instruction}\n{text}"
        user = {"role": "user", "content": _content(text, observation)}
        return [{"role": "system", "content": self._system}, user] if is_first and self._system else [user]


def _content(text: str, observation: Observation) -> str | list[dict[str, Any]]:
    """The text alone, or, with media, content parts in the form of Hugging Face's processors."""
    if not observation.media:
        return text
    images = [{"type": "image", "image": media.data} for media in observation.media]
    return [*images, {"type": "text", "text": text}]


def _parse(template: str) -> tuple[tuple[str, str], ...]:
    """`(literal, name of the placeholder after it or "")` pairs."""
    try:
        fields = list(Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(f"agent_template: {error}; write a brace that is part of the text twice") from error
    pieces = []
    for literal, name, format_spec, conversion in fields:
        if name in STEP_PLACEHOLDERS:
            raise ConfigError(
                f"agent_template: {{{name}}} belongs to mode: step, where each turn's prompt is written afresh; "
                f"in mode: trajectory the history is in the conversation and {{observation}} is the new part of it"
            )
        if name is not None and (name not in TURN_PLACEHOLDERS or format_spec or conversion):
            raise ConfigError(
                f"agent_template: {{{name}}} is no placeholder; those are {', '.join(TURN_PLACEHOLDERS)}, without formats; "
                f"write a brace that is part of the text twice.{nearest(name, TURN_PLACEHOLDERS)}"
            )
        pieces.append((literal, name or ""))
    return tuple(pieces)
