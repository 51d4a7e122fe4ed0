"""An environment behind an OpenEnv server, over one WebSocket an episode."""

import math
import uuid
from collections.abc import Awaitable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar
from urllib.parse import urlsplit

from turnwise.envs.arguments import check_format_penalty
from turnwise.envs.base import TextEnv
from turnwise.envs.openenv.connection import OpenEnvConnection, error_code, error_text
from turnwise.envs.openenv.fields import (
    ActionError,
    ActionField,
    ObservationText,
    action_field,
    observation_text,
    template_fields,
)
from turnwise.errors import EnvironmentFault
from turnwise.types import Reduction

INVALID = "VALIDATION_ERROR"


class OpenEnvEnv(TextEnv):
    """Plays an environment of an OpenEnv server. Its methods are coroutines, so that many episodes wait at
    once without threads.

    `done` ends the episode as terminated: the protocol has no truncation. An action that the server refuses
    (`VALIDATION_ERROR`), or that is no value of its field, is the player's fault: the model reads why, it
    costs `format_penalty` (≤ 0), and the episode continues, as after an empty action (the response held
    none), which isn't sent. Everything else that goes wrong raises EnvironmentFault, so that the episode is
    played again. While the server has no place, the episode waits.

    Args:
        url: address of the server, http or https.
        action: the field of the server's actions that the action is put into, or `json` if the action is the
            whole JSON object. None: the only required field.
        observation: a template over the fields of the server's observations, such as `{board}`. None: the
            only field that is a text, else all fields as JSON.
        reset: further arguments of the server's `reset`.
        format_penalty: reward of an action that isn't valid.
        env_instruction: opens the first prompt.
    """

    relays_foreign_text: ClassVar[bool] = True
    metric_reductions: ClassVar[Mapping[str, Reduction]] = MappingProxyType(
        {"action_is_valid": "mean", "format_penalty": "mean"}
    )

    def __init__(
        self,
        url: str,
        action: str | None = None,
        observation: str | None = None,
        reset: Mapping[str, Any] | None = None,
        format_penalty: float = 0.0,
        env_instruction: str = "",
    ) -> None:
        check_url(url)
        check_format_penalty(format_penalty)
        for name, value in {"action": action, "observation": observation}.items():
            if value is not None and not isinstance(value, str):
                raise EnvironmentFault(f"openenv: got {name} {value!r}; it must be a text")
        if observation is not None:
            template_fields(observation)
        if reset is not None and not isinstance(reset, Mapping):
            raise EnvironmentFault(f"openenv: got reset {reset!r}; it must be a mapping of arguments")
        self._connection = OpenEnvConnection(url)
        self._action = action
        self._observation = observation
        self._reset_arguments = dict(reset or {})
        self._format_penalty = float(format_penalty)
        self._instruction = env_instruction
        self._field: ActionField | None = None
        self._text: ObservationText | None = None
        self._shown = ""
        self._is_over = True

    async def wait_for_place(self) -> None:
        """Connects, and waits until the server has a place for this episode."""
        if not self._connection.is_open:
            await self._connection.open()

    def reset(self, *, seed: int | None = None) -> Any:
        return self._begin(seed)

    async def _begin(self, seed: int | None) -> tuple[str, dict[str, Any]]:
        await self.wait_for_place()
        url = self._connection.url
        if self._field is None:
            schema = await self._connection.schema()
            self._field = action_field(self._action, schema["action"], url)
            self._text = observation_text(self._observation, schema.get("observation") or {}, url)
        arguments = {**self._reset_arguments, "episode_id": uuid.uuid4().hex}
        if seed is not None:
            arguments["seed"] = seed
        reply = await self._connection.ask("reset", arguments)
        if error_code(reply):
            raise EnvironmentFault(f"{url} can't begin an episode: {error_text(reply)}")
        _, is_over = self._read(reply, "reset")
        if is_over:
            raise EnvironmentFault(f"{url} says `done` in answer to reset, before any action")
        return self._shown, {"env_instruction": self._instruction}

    def step(self, action: str) -> Any:
        return self._play(action)

    async def _play(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self._is_over or self._field is None:
            raise EnvironmentFault("OpenEnvEnv.step came before reset or after the end; call reset first")
        if not action:
            return self._refused(self._shown)
        try:
            content = self._field.action(action)
        except ActionError as fault:
            return self._refused(f"{fault}. {self._shown}")
        reply = await self._connection.ask("step", content)
        if error_code(reply) == INVALID:
            return self._refused(f"{error_text(reply)}. {self._shown}")
        if error_code(reply):
            raise EnvironmentFault(f"{self._connection.url} can't play {action!r:.80}: {error_text(reply)}")
        reward, is_over = self._read(reply, "step")
        metrics = {"action_is_valid": 1.0, "format_penalty": 0.0}
        return self._shown, reward, is_over, False, {"metrics": metrics}

    def _refused(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        penalty = self._format_penalty
        metrics = {"action_is_valid": 0.0, "format_penalty": penalty}
        return text, penalty, False, False, {"metrics": metrics}

    def _read(self, reply: Mapping[str, Any], call: str) -> tuple[float, bool]:
        """Reward and end of an observation, whose text is then what is shown. Raises EnvironmentFault if the
        reply has another form."""
        data = reply["data"]
        observation = data.get("observation")
        reward = data.get("reward")
        is_over = data.get("done", False)
        has_form = isinstance(observation, dict) and isinstance(is_over, bool)
        if reply["type"] != "observation" or not has_form:
            raise EnvironmentFault(
                f"{self._connection.url} answers {call} with {str(reply)[:80]}; an observation has "
                "`observation`, `reward` and `done`"
            )
        if reward is None:
            reward = 0.0
        if not isinstance(reward, int | float) or not math.isfinite(reward):
            raise EnvironmentFault(
                f"{self._connection.url} answers {call} with the reward {reward!r}; it must be finite"
            )
        assert self._text is not None
        self._shown = self._text.text(observation)
        self._is_over = is_over
        return float(reward), is_over

    def close(self) -> Any:
        """Ends the session at the server; nothing is to be awaited where none is open."""
        self._is_over = True
        if not self._connection.is_open:
            return None
        closing: Awaitable[None] = self._connection.close()
        return closing


def check_url(url: object) -> None:
    """Raises EnvironmentFault unless `url` is an address with http or https."""
    parts = urlsplit(url) if isinstance(url, str) else None
    if parts is None or parts.scheme not in ("http", "https") or not parts.netloc:
        raise EnvironmentFault(
            f"openenv: got url {url!r:.100}; it must be the address of a server, such as http://127.0.0.1:8000"
        )
