"""The HTTP server of the gateway: hosts, keys, bodies, streams and lost clients. It knows no tree, and no
dialect by name."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from turnwise.errors import ConfigError, NotAvailableError, RequestError, TurnwiseError, install_hint
from turnwise.gateway.dialect import Dialect, GatewayError, ModelRequest, TokenCounter
from turnwise.gateway.dialects import COUNTERS, DIALECTS
from turnwise.gateway.incoming import (
    check_host,
    check_method,
    is_retry,
    key_in_headers,
    key_in_path,
    read_body,
)
from turnwise.gateway.rules import Notices
from turnwise.gateway.sessions import Answered, FindsSessions, Session, as_gateway_error

if TYPE_CHECKING:
    from aiohttp import web

logger = logging.getLogger(__name__)

_RETRIED = (429, 500)
"""Statuses after which a client may send the request again."""
_WRITE_S = 60.0
"""Maximum seconds in which a client must read a part of an answer."""
_SHUTDOWN_S = 1.0
"""Maximum seconds that requests may go on after the end of the gateway."""
_DEFAULT = DIALECTS["/v1/chat/completions"]
"""The dialect of errors before a path is known."""


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Where the gateway listens, and how large a request may be."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 = a free port."""
    public_url: str | None = None
    """The address under which clients reach it; None = host and port."""
    max_body_bytes: int = 16 * 2**20
    keep_alive_s: float = 10.0
    """Seconds between two comments of a stream whose answer isn't finished."""


class _Asked(NamedTuple):
    """A request whose path and key are known."""

    session: Session
    dialect: Dialect
    is_retry: bool


class Gateway:
    """Serves the sessions over HTTP, on the event loop that runs `start`. While this loop stands still,
    connections wait."""

    def __init__(self, sessions: FindsSessions, settings: GatewaySettings) -> None:
        self.sessions = sessions
        self.settings = settings
        self._notices = Notices()
        self._starting = asyncio.Lock()
        self._runner: web.ServerRunner | None = None
        self._port = settings.port
        self._hosts = {settings.host.lower()}
        if settings.public_url:
            name = urlsplit(settings.public_url).hostname
            if name:
                self._hosts.add(name)

    @property
    def url(self) -> str:
        """The address under which clients reach the gateway, without a slash at its end."""
        if self.settings.public_url:
            return self.settings.public_url.rstrip("/")
        host = self.settings.host
        if ":" in host:
            host = f"[{host}]"
        return f"http://{host}:{self._port}"

    def base_url(self, key: str) -> str:
        """The base URL of a session, which holds its key: without `/v1`."""
        return f"{self.url}/s/{key}"

    async def start(self) -> None:
        """Listens, if it doesn't yet. Raises NotAvailableError without aiohttp, ConfigError if the port is in
        use."""
        async with self._starting:
            if self._runner is None:
                await self._start()

    async def _start(self) -> None:
        web = aiohttp_web()
        settings = self.settings
        # A client that goes away cancels its handler.
        server = web.Server(
            self._handle,
            handler_cancellation=True,
            auto_decompress=False,
            access_log=None,
        )
        runner = web.ServerRunner(server, shutdown_timeout=_SHUTDOWN_S)
        self._runner = runner
        await runner.setup()
        site = web.TCPSite(runner, settings.host, settings.port, backlog=1024)
        try:
            await site.start()
        except (OSError, OverflowError) as fault:
            await self.close()
            raise ConfigError(
                f"the gateway can't listen on {settings.host}, port {settings.port}: {fault}; "
                "gateway.host and gateway.port set the address (port 0 = a free one)"
            ) from fault
        self._port = runner.addresses[0][1]
        logger.info("the gateway listens on %s", self.url)

    async def close(self) -> None:
        """Closes all connections."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _handle(self, request: "web.BaseRequest") -> "web.StreamResponse":
        key, path = key_in_path(request.path)
        endpoint: Dialect | TokenCounter = DIALECTS.get(path) or COUNTERS.get(path) or _DEFAULT
        session: Session | None = None
        try:
            check_host(request, self._hosts)
            if path == "/health":
                check_method(request, "GET")
                return _json({"status": "ok"})
            if path not in DIALECTS and path not in COUNTERS and path != "/v1/models":
                raise _not_found(path)
            session = self._session(request, key)
            if path == "/v1/models":
                check_method(request, "GET")
                return _json(_model_list(session))
            check_method(request, "POST")
            body = await read_body(request, self.settings.max_body_bytes)
            if path in COUNTERS:
                counter = COUNTERS[path]
                return _json(counter.response(session.num_prompt_tokens(_read(counter, body))))
            asked = _Asked(session, DIALECTS[path], is_retry(request))
            return await self._answer(request, asked, _read(asked.dialect, body))
        except GatewayError as error:
            if session is not None:
                session.note_refusal(error)
            else:
                self._notices.say(
                    error.code, "the gateway refused a request to %r (%d): %s", path[:80], error.status, error
                )
            return _refusal(endpoint, error)

    async def _answer(
        self, request: "web.BaseRequest", asked: _Asked, read: ModelRequest
    ) -> "web.StreamResponse":
        """Answers a request. A stream's headers are sent with the first comment, so that whatever fails
        before has a status of its own."""
        asking = asyncio.ensure_future(_answered(asked, read))
        is_delivered = False
        response: web.StreamResponse | None = None
        try:
            while read.is_streamed:
                await asyncio.wait([asking], timeout=self.settings.keep_alive_s)
                if asking.done():
                    break
                response = response or await _open_stream(request)
                await _in_time(response.write(b": keep-alive\n\n"))
            try:
                answered = await asking
            except GatewayError as error:
                if response is None:
                    raise
                asked.session.note_refusal(error)
                return await _write_all(response, asked.dialect.error_events(error))
            if not read.is_streamed:
                response = await _write(
                    request, asked.dialect.response(read, answered.choices, answered.name)
                )
            else:
                response = response or await _open_stream(request)
                await _write_all(response, asked.dialect.events(read, answered.choices, answered.name))
            is_delivered = True
            asked.session.deliver(answered)
            return response
        except (ConnectionError, TimeoutError) as fault:
            logger.debug("a client of the gateway was lost: %r", fault)
            request.protocol.force_close()
            return response or _json({})
        finally:
            asking.cancel()
            if not is_delivered and _has_result(asking):
                asked.session.drop(asking.result())

    def _session(self, request: "web.BaseRequest", key: str | None) -> Session:
        """The session of the key in the path, or in the headers."""
        in_headers = key_in_headers(request.headers)
        if key is None:
            if in_headers is None:
                raise GatewayError(
                    "the request has no key: send it as `Authorization: Bearer`, `x-api-key`, or in the base "
                    "URL, /s/KEY/v1",
                    "invalid_api_key",
                )
            return self.sessions.find(in_headers)
        session = self.sessions.find(key)
        if in_headers is not None and in_headers != key and self._is_known(in_headers):
            raise GatewayError(
                "the key in the URL and the key in the headers are of two sessions: send one of them",
                "invalid_api_key",
            )
        return session

    def _is_known(self, key: str) -> bool:
        try:
            self.sessions.find(key)
        except GatewayError as error:
            return error.code == "session_ended"
        return True


@asynccontextmanager
async def serving(gateway: Gateway) -> AsyncIterator[Gateway]:
    """A gateway that serves while the body runs."""
    await gateway.start()
    try:
        yield gateway
    finally:
        await gateway.close()


def aiohttp_web() -> Any:
    """The module `aiohttp.web`. Raises NotAvailableError if it isn't installed."""
    try:
        from aiohttp import web
    except ImportError as fault:
        raise NotAvailableError(
            f"the gateway needs aiohttp, which isn't installed: {install_hint('gateway')}"
        ) from fault
    return web


async def _answered(asked: _Asked, read: ModelRequest) -> Answered:
    """The answers. Whatever fails becomes a GatewayError."""
    try:
        return await asked.session.answer(read, asked.is_retry)
    except GatewayError:
        raise
    except RequestError as fault:
        raise as_gateway_error(fault) from fault
    except TurnwiseError as fault:
        raise GatewayError(f"the model couldn't answer: {fault}", "server_error") from fault
    except Exception as fault:  # boundary: a lost client isn't meant, whatever the fault is
        logger.exception("the model couldn't answer a request of the gateway")
        raise GatewayError(f"the model couldn't answer: {fault!r}", "server_error") from fault


def _has_result(task: asyncio.Future[Answered]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _read(endpoint: Dialect | TokenCounter, body: Mapping[str, Any]) -> ModelRequest:
    try:
        return endpoint.read(body)
    except RequestError as fault:
        raise as_gateway_error(fault) from fault


async def _write(request: "web.BaseRequest", answer: Mapping[str, Any]) -> "web.StreamResponse":
    response = _json(answer)
    await _in_time(response.prepare(request))
    await _in_time(response.write_eof())
    _check_open(request)
    return response


async def _open_stream(request: "web.BaseRequest") -> "web.StreamResponse":
    headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    response: web.StreamResponse = aiohttp_web().StreamResponse(headers=headers)
    await _in_time(response.prepare(request))
    return response


async def _write_all(response: "web.StreamResponse", events: Any) -> "web.StreamResponse":
    for event in events:
        await _in_time(response.write(event))
    await _in_time(response.write_eof())
    return response


async def _in_time(writing: Any) -> None:
    async with asyncio.timeout(_WRITE_S):
        await writing


def _check_open(request: "web.BaseRequest") -> None:
    transport = request.transport
    if transport is None or transport.is_closing():
        raise ConnectionResetError("the client has closed its connection")


def _json(content: Mapping[str, Any], status: int = 200, headers: Any = None) -> "web.Response":
    body = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")
    response: web.Response = aiohttp_web().Response(
        body=body, status=status, headers=headers, content_type="application/json", charset="utf-8"
    )
    return response


def _refusal(endpoint: Dialect | TokenCounter, error: GatewayError) -> "web.Response":
    headers = dict(error.headers)
    if error.status not in _RETRIED:
        headers["x-should-retry"] = "false"
    return _json(endpoint.error(error), error.status, headers)


def _model_list(session: Session) -> dict[str, Any]:
    models = [
        {"id": name, "object": "model", "created": 0, "owned_by": "turnwise"} for name in session.models
    ]
    return {"object": "list", "data": models}


def _not_found(path: str) -> GatewayError:
    endpoints = [f"POST {name}" for name in (*DIALECTS, *COUNTERS)]
    return GatewayError(
        f"there is no {path[:80]!r}; the endpoints are {', '.join(endpoints)}, GET /v1/models, GET /health",
        "not_found",
    )
