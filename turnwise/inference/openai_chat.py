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
from turnwise.types import FinishReason, Message, SamplingParams

_PATH = "/chat/completions"
_CALL_S = 20.0


class OpenAIChat:
    """Chat completions of one model behind a `base_url` such as `http://localhost:8000/v1`. The `api_key` is
    sent as a bearer token, if it isn't empty. `timeout_s` limits the connection and each read. Raises
    ConfigError if `base_url` isn't http(s), or no header can hold the key."""

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key: str = "",
        timeout_s: float = 600.0,
    ) -> None:
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
        body = self._body(messages, sampling)
        if tools:
            body["tools"] = list(tools)
        content = await self._http.ask(_PATH, body)
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
        if sampling.stop_strings:
            body["stop"] = list(sampling.stop_strings)
        return body

    def _answer(self, content: Any, generate_s: float) -> TextAnswer:
        try:
            [choice, *_] = content["choices"]
            message = choice["message"]
            calls = [_tool_call(entry) for entry in message.get("tool_calls") or ()]
            # Some servers leave the key out beside calls.
            text = message.get("content") if calls else message["content"]
            finish_reason: FinishReason = "length" if choice.get("finish_reason") == "length" else "stop"
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            shown = json.dumps(content)[:MAX_SHOWN]
            raise ServerError(f"{self.url} answered without choices[0].message.content: {shown}") from error
        return TextAnswer(text or "", finish_reason, generate_s, tuple(calls))


def _tool_call(entry: Any) -> ToolCall:
    function = entry["function"]
    return ToolCall(function["name"], _arguments(function["arguments"]), entry["id"])


def _arguments(arguments: str) -> Any:
    """The arguments of a call. Arguments that aren't JSON stay text, which the tool's schema refuses."""
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return arguments


def _sent(message: Message) -> Message:
    """A message as the API expects it, with the arguments of calls as text."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        arguments = function["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        calls.append({**call, "function": {**function, "arguments": text}})
    return {**message, "tool_calls": calls} if calls else message
