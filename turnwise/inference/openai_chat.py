"""A text-in, text-out model behind an OpenAI-compatible URL."""

import json
import time
from collections.abc import Sequence
from typing import Any

from turnwise.chat.conversation import TextAnswer
from turnwise.chat.rendering import Tools
from turnwise.errors import ServerError
from turnwise.inference.http_json import MAX_SHOWN, HttpJson, NoAnswerError, NotAllowedError
from turnwise.protocols.tools import ToolCall
from turnwise.types import Message, SamplingParams

_PATH = "/chat/completions"
_CALL_S = 20.0


class OpenAIChat:
    """Chat completions of one model behind a `base_url` such as `http://localhost:8000/v1`. The `api_key` is
    sent as a bearer token, if it isn't empty. `timeout_s` limits the connection and each read. Raises
    ConfigError if `base_url` isn't http(s), or no header can hold the key."""

    def __init__(self, base_url: str, model: str, api_key: str = "", timeout_s: float = 600.0) -> None:
        base_url = base_url.rstrip("/").removesuffix(_PATH)
        self._http = HttpJson(base_url, timeout_s, api_key, key_name="OPENAI_API_KEY")
        self.url = self._http.url + _PATH
        self._model = model

    def call(self) -> None:
        """Checks the URL and the key by asking for the list of models. Raises NoAnswerError if nobody answers
        at the URL, NotAllowedError for 401. Any other refusal passes the check, as a key may lack the right
        to list models."""
        try:
            self._http.ask_now("/models", is_read=False, timeout_s=_CALL_S)
        except (NoAnswerError, NotAllowedError):
            raise
        except ServerError:
            return

    async def complete(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams,
        tools: Tools = (),
    ) -> TextAnswer:
        """Returns the model's answer, which may call `tools`. Raises ServerError for pictures, or if no valid
        answer comes."""
        if not all(isinstance(message.get("content") or "", str) for message in messages):
            raise ServerError(
                f"{self.url} takes no pictures from turnwise; use an environment that renders text"
            )
        started = time.perf_counter()
        content = await self._http.ask(
            _PATH, self._body(messages, sampling) | ({"tools": list(tools)} if tools else {})
        )
        return self._answer(content, time.perf_counter() - started)

    def _body(self, messages: Sequence[Message], sampling: SamplingParams) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [_sent(message) for message in messages],
            "max_tokens": sampling.max_new_tokens,
            "temperature": 0.0 if sampling.is_greedy else sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed % 2**31,
        }
        return body | ({"stop": list(sampling.stop_strings)} if sampling.stop_strings else {})

    def _answer(self, content: Any, generate_s: float) -> TextAnswer:
        try:
            [choice, *_] = content["choices"]
            message, reason = choice["message"], choice.get("finish_reason")
            said = message.get("tool_calls") or ()
            text = (
                message.get("content") if said else message["content"]
            ) or ""  # some servers leave the key out beside calls
            calls = [
                ToolCall(call["function"]["name"], _read(call["function"]["arguments"]), call["id"])
                for call in said
            ]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            shown = json.dumps(content)[:MAX_SHOWN]
            raise ServerError(f"{self.url} answered without choices[0].message.content: {shown}") from error
        return TextAnswer(text, "length" if reason == "length" else "stop", generate_s, tuple(calls))


def _read(arguments: str) -> Any:
    """The arguments of a call. Arguments that aren't JSON stay text, which the tool's schema refuses."""
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return arguments


def _sent(message: Message) -> Message:
    """A message as the API expects it, with the arguments of calls as text."""
    if not (calls := message.get("tool_calls")):
        return message
    functions = [(call, call["function"]["arguments"]) for call in calls]
    texts = [(call, given if isinstance(given, str) else json.dumps(given)) for call, given in functions]
    return {
        **message,
        "tool_calls": [{**call, "function": {**call["function"], "arguments": text}} for call, text in texts],
    }
