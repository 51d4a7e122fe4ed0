"""A simulated user that is a model behind an OpenAI-compatible URL."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from turnwise.errors import ConfigError, ServerError, nearest
from turnwise.inference.openai_chat import OpenAIChat
from turnwise.types import Message, SamplingParams, derive_seed

# The assistant's opening: roles are exchanged.
_OPENING: Message = {"role": "user", "content": "Hello! How can I help you?"}
_INSTRUCTION = (
    "You are a user who talks to an assistant. Write the user's next message and nothing else. When you "
    "have got what you came for, answer {end} alone."
)


class _Settings(BaseModel):
    """The keys of `config` in an interaction file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = ""
    base_url: str
    model: str
    instruction: str = _INSTRUCTION
    """Tells the model whom to play; `{end}` stands for the value of `end`. A row's own `instruction` is
    appended."""
    end: str = Field("[END]", min_length=1)
    """The text by which the user ends the conversation."""
    max_new_tokens: int = Field(512, ge=1)
    temperature: float = Field(1.0, gt=0)


class _Role(NamedTuple):
    instance_id: str
    instruction: str


class ModelUser:
    """A `protocols.Interaction` whose user is played by a model: it reads the policy's final answers and
    writes the user's messages, but scores nothing. Requests carry the API key in `$OPENAI_API_KEY`, if it is
    set. Raises ConfigError if `config` lacks a required key, or has an unknown key or a wrong value."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        try:
            self._settings = _Settings.model_validate(dict(config))
        except ValidationError as error:
            fault = error.errors(include_url=False)[0]
            key = str(fault["loc"][0])
            allowed = _Settings.model_fields
            hint = "" if key in allowed else nearest(key, allowed)
            raise ConfigError(
                f"config.{key}: {fault['msg']}; a model user has {', '.join(allowed)}.{hint}"
            ) from error
        api_key = os.environ.get("OPENAI_API_KEY", "")
        self.chat = OpenAIChat(self._settings.base_url, self._settings.model, api_key)

    async def start_interaction(self, instance_id: str, instruction: str = "", **kwargs: Any) -> _Role:
        common = self._settings.instruction.replace("{end}", self._settings.end)
        return _Role(instance_id, f"{common}\n\n{instruction}".strip())

    async def generate_response(
        self, state: _Role, messages: Sequence[Message], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        settings = self._settings
        seed = derive_seed(state.instance_id, len(messages))
        sampling = SamplingParams(settings.max_new_tokens, settings.temperature, seed=seed)
        system: Message = {"role": "system", "content": state.instruction}
        answer = await self.chat.complete([system, _OPENING, *_as_user(messages)], sampling)
        if not answer.text.strip():
            raise ServerError(
                f"{self.chat.url} answered nothing; raise config.max_new_tokens ({settings.max_new_tokens})"
            )
        return settings.end in answer.text, answer.text, 0.0, {}

    async def calculate_score(self, state: _Role) -> float:
        return 0.0

    async def finalize_interaction(self, state: _Role) -> None: ...


def _as_user(messages: Sequence[Message]) -> list[Message]:
    """The messages with the roles user and assistant exchanged. System messages, tool calls and their results
    are left out."""
    sides = {"user": "assistant", "assistant": "user"}
    exchanged: list[Message] = []
    for message in messages:
        side = sides.get(message["role"])
        has_calls = message.get("tool_calls") or message.get("call_errors")
        if side is not None and not has_calls:
            exchanged.append({"role": side, "content": message["content"]})
    return exchanged
