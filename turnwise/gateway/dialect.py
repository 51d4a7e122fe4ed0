"""What the protocols of clients have in common: a request, an answer, an error, and how fields are read.

A dialect is pure. It reads a client's JSON into a `ModelRequest` and writes the `Choice`s of the answer back;
it opens no socket and knows no tree."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from turnwise.chat.forest import Usage
from turnwise.errors import RequestError, nearest
from turnwise.types import AS_OPENED, CallOptions, Message

STATUS_OF_CODE = {
    "invalid_request": 400,
    "context_length_exceeded": 400,
    "turn_limit": 400,
    "invalid_api_key": 401,
    "wrong_host": 403,
    "browser_page": 403,
    "not_found": 404,
    "model_not_found": 404,
    "method_not_allowed": 405,
    "request_timeout": 408,
    "session_ended": 410,
    "body_too_large": 413,
    "unsupported_media_type": 415,
    "rate_limited": 429,
    "server_error": 500,
}
"""The HTTP status of each code of an error."""

_MAX_SHOWN = 80
_MAX_STOPS = 16


class GatewayError(RequestError):
    """What a client gets instead of an answer: a sentence, a code of `STATUS_OF_CODE`, the field that is at
    fault, and HTTP headers."""

    def __init__(
        self,
        sentence: str,
        code: str = "invalid_request",
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(sentence, code)
        self.param = param
        self.headers = dict(headers or {})

    @property
    def sentence(self) -> str:
        return str(self)

    @property
    def status(self) -> int:
        return STATUS_OF_CODE.get(self.code, 400)


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """A client's request, in whatever dialect it came."""

    model: str
    messages: tuple[Message, ...]
    """In the form of OpenAI's chat: roles system, developer, user, assistant (with `tool_calls` and
    `reasoning_content`) and tool."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """In the form of OpenAI's chat: `{"type": "function", "function": {name, description, parameters}}`."""
    options: CallOptions = AS_OPENED
    """Maximum tokens, stop strings, and the temperature that the client asks for: the session drops it unless
    `gateway.client_temperature`."""
    num_choices: int = 1
    is_streamed: bool = False
    has_logprobs: bool = False
    has_stream_usage: bool = False
    ignored: tuple[str, ...] = ()
    """Fields that the run's sampling overrides: top_p, seed, penalties. The temperature isn't among them."""
    unenforced: tuple[str, ...] = ()
    """What is asked for and can't be enforced: `tool_choice`, `response_format`, a server's own tool. With
    `gateway.strict` the request is refused for it."""
    removed: tuple[str, ...] = ()
    """What the dialect cut from the messages since it changes with every request, such as a billing line."""
    body: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The client's JSON, for what a dialect echoes."""


class TokenLogprob(NamedTuple):
    """A sampled token and its log-prob."""

    token: str
    logprob: float
    token_bytes: tuple[int, ...] | None
    """The token's bytes, those of a part of a character included; None if the tokenizer doesn't say them."""


class Choice(NamedTuple):
    """One sampled answer, as a dialect needs it."""

    message: Message
    """Role, `content` (the text around the calls), and, where there are any, `tool_calls` (arguments as a
    mapping), `call_errors` (a sentence for each call that can't be read; its text is in `content`) and
    `reasoning_content`."""
    finish_reason: str
    """`stop`, `length` or `tool_calls`."""
    usage: Usage
    logprobs: tuple[TokenLogprob, ...] | None = None


class Dialect(Protocol):
    """One endpoint's protocol, as data in and data out."""

    path: str
    """Such as `/v1/chat/completions`."""

    def read(self, body: Mapping[str, Any]) -> ModelRequest:
        """Reads a request. Raises RequestError with a sentence; unknown fields are named, with the nearest
        known one."""

    def response(self, request: ModelRequest, choices: Sequence[Choice], name: str) -> dict[str, Any]:
        """The answer as JSON. `name` is made of the answer, such as `turn-7`: ids are made of it."""

    def events(self, request: ModelRequest, choices: Sequence[Choice], name: str) -> Iterator[bytes]:
        """The answer as server-sent events, the one that ends the stream included."""

    def error(self, error: GatewayError) -> dict[str, Any]:
        """An error in the dialect's own form."""

    def error_events(self, error: GatewayError) -> Iterator[bytes]:
        """What ends a stream that fails after its headers were sent: clients take a stream that just ends for
        a whole answer."""


class TokenCounter(Protocol):
    """An endpoint that counts a prompt's tokens. It samples nothing."""

    path: str

    def read(self, body: Mapping[str, Any]) -> ModelRequest: ...

    def response(self, num_tokens: int) -> dict[str, Any]: ...

    def error(self, error: GatewayError) -> dict[str, Any]: ...


def server_sent_event(data: Mapping[str, Any] | str, event: str | None = None) -> bytes:
    r"""One event of a stream.

    >>> server_sent_event({"a": 1}, "message")
    b'event: message\ndata: {"a":1}\n\n'
    """
    if not isinstance(data, str):
        data = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    head = "" if event is None else f"event: {event}\n"
    return f"{head}data: {data}\n\n".encode()


def arguments_text(arguments: Any) -> str:
    """A call's arguments as clients get them: a text of JSON."""
    return json.dumps(arguments, ensure_ascii=False)


def check_fields(body: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raises GatewayError if the body has a field that isn't known."""
    known = set(known)
    unknown = [name for name in body if name not in known]
    if unknown:
        name = unknown[0]
        names = ", ".join(repr(name[:_MAX_SHOWN]) for name in unknown[:3])
        raise GatewayError(f"unknown field {names}.{nearest(name, sorted(known))}", param=name)


def refuse(body: Mapping[str, Any], refused: Mapping[str, str]) -> None:
    """Raises GatewayError if the body asks for something that the gateway doesn't do. `refused` says for each
    field what to do instead; null, false and empty values ask for nothing."""
    for name, advice in refused.items():
        if body.get(name):
            raise GatewayError(f"`{name}` isn't served: {advice}", param=name)


def read_text(body: Mapping[str, Any], name: str) -> str:
    """A field that must be a text of at least one character."""
    value = body.get(name)
    if not isinstance(value, str) or not value:
        raise _wrong(name, value, "a text")
    return value


def read_flag(body: Mapping[str, Any], name: str) -> bool:
    """A field that is true or false; absent and null are false."""
    value = body.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise _wrong(name, value, "true or false")
    return value


def read_count(body: Mapping[str, Any], name: str) -> int | None:
    """A field that is a whole number ≥ 1; absent and null are None."""
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _wrong(name, value, "a whole number ≥ 1")
    return value


def read_number(body: Mapping[str, Any], name: str, least: float, most: float) -> float | None:
    """A field that is a number from `least` to `most`; absent and null are None."""
    value = body.get(name)
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not least <= value <= most:
        raise _wrong(name, value, f"a number from {least:g} to {most:g}")
    return float(value)


def read_list(body: Mapping[str, Any], name: str) -> Sequence[Any]:
    """A field that is a list; absent and null are empty."""
    value = body.get(name)
    if value is None:
        return ()
    if not isinstance(value, list):
        raise _wrong(name, value, "a list")
    return value


def read_stop(body: Mapping[str, Any], name: str = "stop") -> tuple[str, ...] | None:
    """A field that is a text or a list of texts, each of at least one character; None if there are none."""
    value = body.get(name)
    texts = [value] if isinstance(value, str) else read_list(body, name)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise _wrong(name, text, "a text or a list of texts, none of them empty")
    if len(texts) > _MAX_STOPS:
        raise GatewayError(f"`{name}` has {len(texts)} texts; at most {_MAX_STOPS} are served", param=name)
    return tuple(texts) or None


def function_tool(name: Any, description: Any, parameters: Any) -> Mapping[str, Any]:
    """A tool in the form of OpenAI's chat. Whichever dialect brings it, it is rendered the same."""
    function: dict[str, Any] = {"name": name}
    if description:
        function["description"] = description
    if parameters:
        function["parameters"] = parameters
    return {"type": "function", "function": function}


def _wrong(name: str, value: Any, allowed: str) -> GatewayError:
    return GatewayError(f"`{name}` is {str(value)[:_MAX_SHOWN]!r}; it must be {allowed}", param=name)
