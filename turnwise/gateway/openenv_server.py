"""Serves an environment to programs of others, in OpenEnv's protocol (version 0.10)."""

import asyncio
import inspect
import json
import logging
import math
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from turnwise.errors import ConfigError, NotAvailableError, TurnwiseError, install_hint
from turnwise.gateway.dialect import GatewayError
from turnwise.gateway.incoming import check_host, check_no_page, is_loopback, read_body
from turnwise.protocols import Env
from turnwise.runtime.foreign import Foreign
from turnwise.runtime.threads import DaemonThread
from turnwise.runtime.websocket_frames import WebSocketFrames, is_text
from turnwise.types import Observation

if TYPE_CHECKING:
    from aiohttp import web

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 2**20

Json = dict[str, Any]

_METADATA: Json = {"type": "object", "additionalProperties": True, "default": {}}
_OBSERVATION: Json = {
    "title": "Observation",
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "done": {"type": "boolean", "default": False},
        "reward": {"anyOf": [{"type": "number"}, {"type": "null"}], "default": None},
        "metadata": _METADATA,
    },
    "required": ["text"],
}
_ACTION: Json = {
    "title": "Action",
    "type": "object",
    "properties": {"action": {"type": "string"}, "metadata": _METADATA},
    "required": ["action"],
}
_STATE: Json = {
    "title": "State",
    "type": "object",
    "properties": {
        "episode_id": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "step_count": {"type": "integer"},
    },
}
SCHEMA: Json = {"action": _ACTION, "observation": _OBSERVATION, "state": _STATE}
"""What `/schema` answers: an action and an observation are texts."""


class _RefusedError(Exception):
    """What a client is told: `code` is one of OpenEnv's."""

    def __init__(self, code: str, message: str, **details: Any) -> None:
        super().__init__(message)
        self.data = {"message": message, "code": code, **details}


class _Session:
    """The environment of one socket, in a thread of its own: the environment may block."""

    def __init__(self, make_env: Callable[[], Env]) -> None:
        self._make_env = make_env
        self._thread = DaemonThread("served environment")
        self._env: Env | None = None
        self._episode_id: str | None = None
        self._num_steps = 0
        self._is_over = True

    async def answer(self, message: Any) -> Json:
        """The reply to a message. An error becomes a reply too."""
        try:
            return await self._answer(message)
        except _RefusedError as refusal:
            return {"type": "error", "data": refusal.data}

    async def _answer(self, message: Any) -> Json:
        if not isinstance(message, dict):
            raise _RefusedError("VALIDATION_ERROR", "a message is a JSON object with `type`")
        data = message.get("data", {})
        if not isinstance(data, dict):
            raise _invalid("data", "it must be a JSON object")
        match message.get("type"):
            case "reset":
                return {"type": "observation", "data": await self.reset(data)}
            case "step":
                return {"type": "observation", "data": await self.step(data)}
            case "state":
                return {"type": "state", "data": self.state()}
            case kind:
                raise _RefusedError("UNKNOWN_TYPE", f"Unknown message type: {kind}")

    async def reset(self, data: Mapping[str, Any]) -> Json:
        """Begins an episode with `seed` and `episode_id`; other arguments are ignored, as OpenEnv does."""
        seed = data.get("seed")
        if seed is not None and (type(seed) is not int or seed < 0):
            raise _invalid("seed", "it must be a whole number, 0 or more")
        if self._env is None:
            self._env = await self._called(self._make_env)
        observation, info = await self._called(self._env.reset, seed=seed)
        self._episode_id = str(data.get("episode_id") or uuid.uuid4())
        self._num_steps = 0
        self._is_over = False
        instruction = str(info.get("env_instruction", ""))
        text = "\n".join(part for part in (instruction, _text(observation)) if part)
        return _observation(text, None, False, {})

    async def step(self, data: Mapping[str, Any]) -> Json:
        """Plays the text `action`. A truncated episode is `done`, and `metadata.truncated` says so."""
        unknown = data.keys() - {"action", "metadata"}
        if unknown:
            raise _invalid(min(unknown), "extra inputs are not permitted")
        action = data.get("action")
        if not isinstance(action, str):
            raise _invalid("action", "it must be a text")
        if self._is_over or self._env is None:
            raise _RefusedError("EXECUTION_ERROR", "the episode is over, or none has begun; send reset first")
        result = await self._called(self._env.step, action)
        observation, reward, is_terminated, is_truncated, info = result
        self._num_steps += 1
        self._is_over = bool(is_terminated or is_truncated)
        if not math.isfinite(reward):
            raise _RefusedError("EXECUTION_ERROR", f"the environment gave the reward {reward!r}")
        metadata: Json = {}
        if info.get("metrics"):
            metadata["metrics"] = {name: float(value) for name, value in info["metrics"].items()}
        if is_truncated:
            metadata["truncated"] = True
        return _observation(_text(observation), float(reward), self._is_over, metadata)

    def state(self) -> Json:
        return {"episode_id": self._episode_id, "step_count": self._num_steps}

    async def close(self) -> None:
        if self._env is not None:
            try:
                await self._called(self._env.close)
            except _RefusedError as refusal:
                logger.warning("closing a served environment: %s", refusal)
        self._thread.end()

    async def _called(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The result of a call of the environment. An exception of the environment is the client's answer."""
        call = self._thread.start(lambda: function(*args, **kwargs))
        try:
            with Foreign("the environment", are_faults=True):
                result = await asyncio.wrap_future(call)
                if inspect.isawaitable(result):
                    result = await result
                return result
        except TurnwiseError as fault:
            logger.warning("a served environment can't go on: %s", fault)
            raise _RefusedError("EXECUTION_ERROR", str(fault)) from fault


def _invalid(field: str, problem: str) -> _RefusedError:
    errors = [{"type": "value_error", "loc": [field], "msg": problem}]
    return _RefusedError("VALIDATION_ERROR", "Invalid message", errors=errors)


def _text(observation: str | Observation) -> str:
    return observation if isinstance(observation, str) else observation.text


def _observation(text: str, reward: float | None, is_over: bool, metadata: Json) -> Json:
    data: Json = {"observation": {"text": text, "metadata": metadata}, "reward": reward, "done": is_over}
    if metadata:
        data["metadata"] = metadata
    return data


class OpenEnvServer:
    """Serves environments of `make_env`: one to each socket, at most `max_sessions` at once. The routes
    without a socket share one more.

    Args:
        port: 0 = a free port; `url` has it once the server has started.
    """

    def __init__(
        self,
        make_env: Callable[[], Env],
        name: str,
        *,
        host: str = "127.0.0.1",
        port: int = 8000,
        max_sessions: int = 64,
    ) -> None:
        self._make_env = make_env
        self._name = name
        self._host = host
        self._port = port
        self._max_sessions = max_sessions
        self._num_sessions = 0
        self._shared: _Session | None = None
        self._lock = asyncio.Lock()
        self._runner: Any = None
        self.url = ""

    async def start(self) -> None:
        """Listens. Raises ConfigError if the address can't be used, NotAvailableError without aiohttp."""
        try:
            from aiohttp import web
        except ModuleNotFoundError as fault:
            raise NotAvailableError(
                f"serving an environment needs aiohttp: {install_hint('gateway')}"
            ) from fault
        app = web.Application(middlewares=[_only_programs(self._host)])
        app.router.add_get("/ws", self._socket)
        app.router.add_post("/reset", self._posted_reset)
        app.router.add_post("/step", self._posted_step)
        fixed = {
            "/schema": SCHEMA,
            "/health": {"status": "healthy"},
            "/metadata": {"name": self._name, "description": f"{self._name}, served by turnwise"},
        }
        for path, content in fixed.items():
            app.router.add_get(path, _always(content))
        app.router.add_get("/state", self._state)
        self._runner = web.AppRunner(app, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port)
        try:
            await site.start()
        except (OSError, OverflowError) as fault:
            await self._runner.cleanup()
            raise ConfigError(
                f"{self._host}:{self._port} can't be listened on ({fault}); name another --host or --port"
            ) from fault
        port = self._runner.addresses[0][1]
        self.url = f"http://{self._host}:{port}"

    async def close(self) -> None:
        """Ends all sessions."""
        if self._runner is not None:
            await self._runner.cleanup()
        if self._shared is not None:
            await self._shared.close()

    async def _socket(self, request: "web.Request") -> Any:
        from aiohttp import web

        socket = web.WebSocketResponse(max_msg_size=MAX_BODY_BYTES)
        await socket.prepare(request)
        if self._num_sessions >= self._max_sessions:
            full = f"Server at capacity: {self._num_sessions}/{self._max_sessions} sessions active"
            counts = {"active_sessions": self._num_sessions, "max_sessions": self._max_sessions}
            await socket.send_json(
                {"type": "error", "data": {"message": full, "code": "CAPACITY_REACHED", **counts}}
            )
            await socket.close()
            return socket
        self._num_sessions += 1
        session = _Session(self._make_env)
        frames = WebSocketFrames(socket)
        try:
            await _converse(socket, frames, session)
        except ConnectionError:
            pass  # the client is gone
        finally:
            self._num_sessions -= 1
            await frames.close()
            await session.close()
        await socket.close()
        return socket

    async def _posted_reset(self, request: "web.Request") -> Any:
        return await self._posted(request, lambda session, body: session.reset(body))

    async def _posted_step(self, request: "web.Request") -> Any:
        def step(session: _Session, body: Json) -> Awaitable[Json]:
            action = body.get("action")
            if not isinstance(action, dict):
                raise _invalid("action", "it must be a JSON object")
            return session.step(action)

        return await self._posted(request, step)

    async def _posted(self, request: "web.Request", call: Callable[[_Session, Json], Awaitable[Json]]) -> Any:
        from aiohttp import web

        try:
            body: Json = {}
            if request.can_read_body:
                # Before the lock: a body that comes slowly holds up nobody else.
                body = dict(await read_body(request, MAX_BODY_BYTES, "send less"))
            async with self._lock:
                self._shared = self._shared or _Session(self._make_env)
                return web.json_response(await call(self._shared, body))
        except GatewayError as fault:
            status = 422 if fault.status == 400 else fault.status
            return web.json_response({"detail": fault.sentence}, status=status)
        except _RefusedError as refusal:
            status = 422 if refusal.data["code"] == "VALIDATION_ERROR" else 500
            return web.json_response({"detail": refusal.data}, status=status)

    async def _state(self, request: "web.Request") -> Any:
        from aiohttp import web

        self._shared = self._shared or _Session(self._make_env)
        return web.json_response(self._shared.state())


async def _converse(socket: Any, frames: WebSocketFrames, session: _Session) -> None:
    """Answers the messages of a socket until it ends, or the client says `close`."""
    while is_text(received := await frames.next()):
        try:
            message = json.loads(received.data)
        except (ValueError, RecursionError) as fault:
            data = {"message": f"Invalid JSON: {fault}", "code": "INVALID_JSON"}
            await socket.send_json({"type": "error", "data": data})
            continue
        if isinstance(message, dict) and message.get("type") == "close":
            return
        await socket.send_json(await session.answer(message))


def _only_programs(host: str) -> Any:
    """Refuses what a page in a browser asks: any page could play here, as no key is asked for. While only
    this machine is served, its names are known, so a name of somebody else that points here is refused."""
    from aiohttp import web

    @web.middleware
    async def check(request: web.Request, handler: Callable[[web.Request], Awaitable[Any]]) -> Any:
        try:
            check_no_page(request)
            if is_loopback(host):
                check_host(request, {host}, "--host sets the address")
        except GatewayError as fault:
            return web.json_response({"detail": fault.sentence}, status=fault.status)
        return await handler(request)

    return check


def _always(content: Json) -> Callable[["web.Request"], Awaitable[Any]]:
    """A route that always answers the same."""

    async def answer(request: "web.Request") -> Any:
        from aiohttp import web

        return web.json_response(content)

    return answer
