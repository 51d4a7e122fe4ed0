"""A model behind an OpenAI-compatible URL, by text: the standard library's HTTP client and nothing else."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from turnwise.chat.text_conversation import TextAnswer
from turnwise.errors import ConfigError, ServerError
from turnwise.runtime.threads import DaemonThread
from turnwise.types import Message, SamplingParams

_MAX_SHOWN = 300
"""Characters of a server's own words."""


class OpenAIChat:
    """Chat completions of one model.

    Args:
        base_url: such as `http://localhost:8000/v1`.
        api_key: sent as a bearer token; "" sends none.
        timeout_s: seconds for one answer.

    Raises:
        ConfigError: `base_url` isn't http(s).
    """

    def __init__(self, base_url: str, model: str, api_key: str = "", timeout_s: float = 600.0) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError(f"got the URL {base_url!r}; it must be like http://localhost:8000/v1")
        self.url = f"{base_url.rstrip('/').removesuffix('/chat/completions')}/chat/completions"
        self._model = model
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        self._timeout_s = timeout_s

    async def complete(self, messages: Sequence[Message], sampling: SamplingParams) -> TextAnswer:
        """The model's answer to a conversation.

        Raises:
            ServerError: there is no answer, or none that can be read, or the messages hold pictures.
        """
        if not all(isinstance(message["content"], str) for message in messages):
            raise ServerError(f"{self.url} is asked by text alone; use an environment that renders text")
        thread = DaemonThread("openai")
        started = time.perf_counter()
        try:
            content = await asyncio.wrap_future(thread.start(self._post, self._body(messages, sampling)))
        finally:
            thread.end()
        return self._answer(content, time.perf_counter() - started)

    def _body(self, messages: Sequence[Message], sampling: SamplingParams) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "messages": list(messages),
            "max_tokens": sampling.max_new_tokens,
            "temperature": 0.0 if sampling.is_greedy else sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed % 2**31,
        }
        return body | ({"stop": list(sampling.stop_strings)} if sampling.stop_strings else {})

    def _post(self, body: Mapping[str, Any]) -> Any:
        request = Request(self.url, json.dumps(body).encode(), self._headers)
        try:
            with urlopen(request, timeout=self._timeout_s) as response:
                return json.loads(response.read())
        except HTTPError as error:
            said = error.read().decode(errors="replace")[:_MAX_SHOWN]
            hint = "; set OPENAI_API_KEY" if error.code in (401, 403) else ""
            raise ServerError(f"{self.url} answered {error.code} {error.reason}{hint}: {said}") from error
        except (URLError, TimeoutError, ConnectionError, HTTPException) as error:
            raise ServerError(f"{self.url} doesn't answer ({error}); is the server up, and the URL right?") from error
        except ValueError as error:
            raise ServerError(f"{self.url} answered with something that isn't JSON ({error})") from error

    def _answer(self, content: Any, generate_s: float) -> TextAnswer:
        try:
            [choice, *_] = content["choices"]
            text, reason = choice["message"]["content"] or "", choice.get("finish_reason")
        except (KeyError, TypeError, ValueError) as error:
            shown = json.dumps(content)[:_MAX_SHOWN]
            raise ServerError(f"{self.url} answered without choices[0].message.content: {shown}") from error
        return TextAnswer(text, "length" if reason == "length" else "stop", generate_s)
