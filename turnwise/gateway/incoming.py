"""What of an HTTP request is read before a dialect is asked: host, key, method and body."""

import asyncio
import json
import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from turnwise.gateway.dialect import GatewayError

if TYPE_CHECKING:
    from aiohttp import web

_SLASHES = re.compile("/+")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_CLOSE = {"Connection": "close"}
_BODY_S = 60.0
"""Maximum seconds in which a body must arrive."""
_MAX_DEPTH = 200
_CONTAINERS = (dict, list)


def check_host(
    request: "web.BaseRequest", names: Collection[str], hint: str = "gateway.public_url sets the address"
) -> None:
    """Raises GatewayError for a host that is none of `names`, nor this machine. A page in a browser could
    reach this server under a name of its own. `hint` says what changes the names."""
    name = _host_name(request.headers.get("Host", ""))
    if name not in _LOOPBACK and name not in names:
        raise GatewayError(f"the host {name[:80]!r} isn't this server's; {hint}", "wrong_host")


def check_no_page(request: "web.BaseRequest") -> None:
    """Raises GatewayError for what a page in a browser asks: programs send no `Origin`."""
    origin = request.headers.get("Origin")
    if origin is not None:
        raise GatewayError(
            f"a page of {origin[:80]!r} may not ask this server; ask it from a program", "browser_page"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens on this host."""
    return host in _LOOPBACK or host == "::1"


async def read_body(
    request: "web.BaseRequest", max_bytes: int, hint: str = "gateway.max_body_mb sets the limit"
) -> Mapping[str, Any]:
    """The JSON object that a request brings. Raises GatewayError if it is too large, late, compressed or
    anything else. `hint` says what changes the limit."""
    if request.content_type != "application/json":
        raise GatewayError(
            f"the content type is {request.content_type!r}; send application/json",
            "unsupported_media_type",
        )
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise GatewayError(
            f"the content encoding is {encoding[:80]!r}; send the body uncompressed",
            "unsupported_media_type",
        )
    try:
        async with asyncio.timeout(_BODY_S):
            content = await _content(request, max_bytes, hint)
    except TimeoutError:
        sentence = f"the body didn't arrive within {_BODY_S:g} s"
        raise GatewayError(sentence, "request_timeout", headers=_CLOSE) from None
    return parsed_body(content)


async def _content(request: "web.BaseRequest", limit: int, hint: str) -> bytes:
    chunks: list[bytes] = []
    size = 0
    if (request.content_length or 0) <= limit:
        async for chunk in request.content.iter_any():
            chunks.append(chunk)
            size += len(chunk)
            if size > limit:
                break
        else:
            return b"".join(chunks)
    # The rest isn't read, so the connection can't serve another request.
    raise GatewayError(f"the body has more than {limit:,} bytes; {hint}", "body_too_large", headers=_CLOSE)


def parsed_body(content: bytes) -> Mapping[str, Any]:
    """The JSON object in a body. Raises GatewayError if it is none, or no strict JSON."""
    try:
        body = json.loads(content, parse_constant=_refuse_constant)
    except RecursionError:
        raise GatewayError("the body is nested too deeply") from None
    except ValueError as fault:  # UnicodeDecodeError is one
        raise GatewayError(f"the body isn't JSON: {fault}") from None
    if not isinstance(body, dict):
        raise GatewayError(f"the body must be a JSON object, not {type(body).__name__}")
    if _is_deeper(body, _MAX_DEPTH):
        raise GatewayError(f"the body is nested deeper than {_MAX_DEPTH} levels")
    # Only an escape can make a text that isn't one; no tokenizer takes it.
    if (b"\\ud" in content or b"\\uD" in content) and not _is_text(body):
        raise GatewayError("the body has half a surrogate pair (\\ud800 to \\udfff): send texts as UTF-8")
    return body


def check_method(request: "web.BaseRequest", method: str) -> None:
    if request.method != method:
        raise GatewayError(
            f"the method is {request.method}; send {method}", "method_not_allowed", headers={"Allow": method}
        )


def key_in_path(path: str) -> tuple[str | None, str]:
    """The key in `/s/KEY/…`, and the rest of the path. Slashes that follow each other count as one: a base
    URL may end with one."""
    path = _SLASHES.sub("/", path)
    if not path.startswith("/s/"):
        return None, path
    key, slash, rest = path[3:].partition("/")
    return key, slash + rest


def key_in_headers(headers: Mapping[str, str]) -> str | None:
    kind, _, key = headers.get("Authorization", "").partition(" ")
    if kind.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key") or None


def _host_name(host: str) -> str:
    """The name in a header `Host`, without the port."""
    if host.startswith("["):
        return host.partition("]")[0].removeprefix("[").lower()
    return host.partition(":")[0].lower()


def is_retry(request: "web.BaseRequest") -> bool:
    count = request.headers.get("x-stainless-retry-count", "0")
    return count.isdecimal() and int(count) > 0


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} isn't a number of JSON")


def _is_text(body: Mapping[str, Any]) -> bool:
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_deeper(value: Any, depth: int) -> bool:
    level: list[Any] = [value]
    for _ in range(depth):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner += item.values()
            elif isinstance(item, list):
                inner += item
        level = [item for item in inner if isinstance(item, _CONTAINERS)]
        if not level:
            return False
    return True
