"""Writes the prompts of an environment's agent: observations as chat messages."""

from collections.abc import Sequence
from string import Formatter
from typing import Any

from turnwise.errors import ConfigError, nearest
from turnwise.spec import STEP_PLACEHOLDERS, TURN_PLACEHOLDERS, ContextMode
from turnwise.types import Message, Observation, Turn


class EnvPrompt:
    """Writes the messages before each response.

    Each turn has a user message. In mode `trajectory` the first turn also shows the system message and the
    environment's instruction. In mode `step` each turn opens a context and shows both; `{history}` is the
    last `history_length` turns (None = all).

    `system_template` is used as it is; "" means none. `turn_template` is filled with `TURN_PLACEHOLDERS`, in
    mode `step` with `STEP_PLACEHOLDERS` as well; a literal brace is written twice. An environment's text is
    inserted as it is, braces included. The instruction begins the user message, unless the template has
    `{env_instruction}`. Raises ConfigError if `turn_template` has an unknown placeholder or a lone brace.

    >>> prompt = EnvPrompt("", "Turn {turn_idx}: {observation}")
    >>> start = Observation("{P}")
    >>> prompt.messages(start, turn_idx=1, actions_left=9, max_response_length=8, env_instruction="Walk.")
    [{'role': 'user', 'content': 'Walk.\\nTurn 1: {P}'}]
    """

    def __init__(
        self,
        system_template: str,
        turn_template: str,
        mode: ContextMode = "trajectory",
        history_length: int | None = None,
    ) -> None:
        self._system = system_template
        self._pieces = _parse(turn_template, mode)
        self._names = frozenset(name for _, name in self._pieces)
        self._mode = mode
        self._history_length = history_length

    def messages(
        self,
        observation: Observation,
        *,
        turn_idx: int,
        actions_left: int,
        max_response_length: int,
        env_instruction: str = "",
        suffix: str = "",
        earlier: Sequence[Turn] = (),
    ) -> list[Message]:
        """The messages before the response of turn `turn_idx` (from 1). `earlier` are the episode's turns
        before it."""
        values = {
            "observation": observation.text,
            "turn_idx": str(turn_idx),
            "actions_left": str(actions_left),
            "max_response_length": str(max_response_length),
            "env_instruction": env_instruction,
            "suffix": suffix,
        }
        if self._mode == "step":
            values |= self._of_step(observation, turn_idx, earlier)
        values[""] = ""  # after the last literal there is no placeholder
        text = "".join(literal + values[name] for literal, name in self._pieces)
        opens_context = turn_idx == 1 or self._mode == "step"
        if opens_context and env_instruction and "env_instruction" not in self._names:
            text = f"{env_instruction}\n{text}"
        messages: list[Message] = []
        if opens_context and self._system:
            messages.append({"role": "system", "content": self._system})
        messages.append({"role": "user", "content": _content(text, observation)})
        return messages

    def _of_step(
        self,
        observation: Observation,
        turn_idx: int,
        earlier: Sequence[Turn],
    ) -> dict[str, str]:
        length = len(earlier)
        if self._history_length is not None:
            length = min(length, self._history_length)
        history = ""
        if "history" in self._names:
            first = len(earlier) - length
            history = _history(earlier[first:], first + 1)
        return {
            "history": history,
            "history_length": str(length),
            "step_count": str(turn_idx - 1),
            "current_step": str(turn_idx),
            "current_observation": observation.text,
        }


def _history(turns: Sequence[Turn], first_step: int) -> str:
    """Observation and action of each turn, numbered from `first_step`.

    >>> turn = Turn([], [], [], observation="P _ G", action="Right")
    >>> print(_history([turn, Turn([], [], [], observation="_ P G")], first_step=3))
    Step 3:
    P _ G
    Action: Right
    Step 4:
    _ P G
    No action could be read from the answer.
    """
    lines = []
    for step, turn in enumerate(turns, first_step):
        lines += [f"Step {step}:", turn.observation]
        if turn.action is None:
            lines.append("No action could be read from the answer.")
        else:
            lines.append(f"Action: {turn.action}")
    return "\n".join(lines)


def _content(text: str, observation: Observation) -> str | list[dict[str, Any]]:
    """The text; with media, a list of content parts as Hugging Face's processors expect it."""
    if not observation.media:
        return text
    images = [{"type": "image", "image": media.data} for media in observation.media]
    return [*images, {"type": "text", "text": text}]


def _parse(template: str, mode: ContextMode) -> tuple[tuple[str, str], ...]:
    """The pieces of a template, as `(literal, name of the placeholder after it, or "")`."""
    allowed: tuple[str, ...] = TURN_PLACEHOLDERS
    if mode == "step":
        allowed += STEP_PLACEHOLDERS
    try:
        fields = list(Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(f"agent_template: {error}; write a brace that is part of the text twice") from error
    pieces = []
    for literal, name, format_spec, conversion in fields:
        if name in STEP_PLACEHOLDERS and name not in allowed:
            raise ConfigError(
                f"agent_template: {{{name}}} belongs to mode: step, where each turn's prompt is written "
                "afresh; in mode: trajectory the history is in the conversation and {observation} is the new "
                "part of it"
            )
        if name is not None and (name not in allowed or format_spec or conversion):
            raise ConfigError(
                f"agent_template: {{{name}}} isn't a placeholder; allowed are {', '.join(allowed)}, without "
                f"formats; write a brace that is part of the text twice.{nearest(name, allowed)}"
            )
        pieces.append((literal, name or ""))
    return tuple(pieces)
