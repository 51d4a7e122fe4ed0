"""A client for JSON over HTTP: the standard library's `urlopen`, run in threads."""

import json
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from turnwise.errors import ConfigError, ServerError
from turnwise.runtime.threads import DaemonPool

MAX_SHOWN = 300
"""Maximum characters of a server's answer that an error message quotes."""


class NoAnswerError(ServerError):
    """Nobody answers at the URL, or not in time."""


class BusyError(ServerError):
    """The server answered 429 or 5xx: it may answer later."""


class NotAllowedError(ServerError):
    """The server answered 401: the key is missing or wrong."""


class HttpJson:
    """A client of a server that reads and writes JSON. `timeout_s` is the limit in seconds for a connection
    and for each read, None for no limit. An `api_key` is sent as a bearer token, without the white space
    around it. `key_name` is the key's environment variable, for error messages about the key. Raises
    ConfigError if `base_url` isn't http(s), or the key has other characters than printable ASCII."""

    def __init__(
        self,
        base_url: str,
        timeout_s: float | None = None,
        api_key: str = "",
        key_name: str = "",
    ) -> None:
        try:
            parts = urlsplit(base_url)
        except ValueError:  # a bracket without its pair
            parts = urlsplit("")
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError(f"got the URL {base_url!r}; it must be like http://localhost:8000/v1")
        api_key = api_key.strip()
        if not (api_key.isascii() and api_key.isprintable()):  # http.client's own error would show the key
            raise ConfigError(
                f"the key in {key_name or 'api_key'} holds a line break or another character that no HTTP "
                "header takes; allowed is printable ASCII: set it again, without quotes"
            )
        self.url = base_url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout_s = timeout_s
        self._hint = f"; set {key_name}" if key_name else ""
        self._threads = DaemonPool("http")

    async def ask(self, path: str, body: Mapping[str, Any] | None = None, is_read: bool = True) -> Any:
        """Runs `ask_now` in a thread, so that the event loop goes on."""
        return await self._threads.call(self.ask_now, path, body, is_read)

    def ask_now(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        is_read: bool = True,
        timeout_s: float | None = None,
    ) -> Any:
        """Sends a POST with the `body`, or a GET if it is None. Returns the JSON answer if `is_read`, else
        None. `timeout_s` defaults to the client's. Raises NoAnswerError if nobody answers; BusyError for 429
        and 5xx; NotAllowedError for 401; ServerError for any other HTTP error, or if an answer to be read
        isn't JSON."""
        url = self.url + path
        content = None if body is None else json.dumps(body).encode()
        try:
            request = Request(url, content, self._headers)
            with urlopen(request, timeout=timeout_s or self._timeout_s) as response:
                answer = response.read()
        except HTTPError as error:
            shown = ""
            with suppress(OSError, HTTPException):  # the status is known, even if the text doesn't come
                shown = error.read().decode(errors="replace")[:MAX_SHOWN]
            hint = self._hint if error.code in (401, 403) else ""
            message = f"{url} answered {error.code} {error.reason}{hint}: {shown}"
            raise _error_class(error.code)(message) from error
        except (OSError, HTTPException, ValueError) as error:
            raise NoAnswerError(
                f"{url} doesn't answer ({error}); is the server up, and the URL right?"
            ) from error
        if not is_read:
            return None
        try:
            return json.loads(answer)
        except ValueError as error:
            raise ServerError(f"{url} answered with something that isn't JSON ({error})") from error


def _error_class(status: int) -> type[ServerError]:
    if status == 429 or status >= 500:
        return BusyError
    if status == 401:
        return NotAllowedError
    return ServerError
