"""Messages of MCP servers that aren't quite in the protocol's form. The official client refuses such a
message whole: a list of tools for one wrong tool, and a result for one part of a kind that it doesn't
know."""

import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self

logger = logging.getLogger(__name__)


class ReadableMessages:
    """A client's stream of received messages, in the protocol's form (`with_known_parts`)."""

    def __init__(self, stream: Any, types: Any) -> None:
        self._stream = stream
        self._types = types

    async def receive(self) -> Any:
        return _readable(await self._stream.receive(), self._types)

    async def aclose(self) -> None:
        await self._stream.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        return _readable(await self._stream.__anext__(), self._types)

    async def __aenter__(self) -> Self:
        await self._stream.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        is_handled: bool | None = await self._stream.__aexit__(kind, fault, trace)
        return is_handled

    @property
    def last_context(self) -> Any:
        match self._stream:
            case object(last_context=context):
                return context
        return None


@asynccontextmanager
async def readable(transport: Any, types: Any) -> AsyncIterator[tuple[ReadableMessages, Any]]:
    """The transport's two streams, where the received messages are `ReadableMessages`. `types` is the
    client's module."""
    async with transport as (received, sent):
        yield ReadableMessages(received, types), sent


def _readable(item: Any, types: Any) -> Any:
    match item:
        case object(message=object(result=dict() as result) as answer):
            answer.result = with_known_parts(result, types)
    return item


def with_known_parts(result: Mapping[str, Any], types: Any) -> dict[str, Any]:
    """The result of a request. In a list of tools, an input schema gets the `type` that it lacks, and a tool
    that can't be read is left out, with a warning that names it. In a call's result, a text names each part
    that can't be read."""
    changed = dict(result)
    if isinstance(result.get("tools"), Sequence):
        tools = map(_with_type, result["tools"])
        changed["tools"] = [tool for tool in tools if _is_known_tool(tool, types)]
    if "content" in result or "structuredContent" in result:
        parts = result.get("content")
        if not isinstance(parts, list):
            parts = []
        changed["content"] = [_known_part(part, types) for part in parts]
    return changed


def _with_type(tool: Any) -> Any:
    if not isinstance(tool, Mapping):
        return tool
    schema = tool.get("inputSchema") or {}
    types_of_objects = (None, "object", ["object"], ["object", "null"])
    if not isinstance(schema, Mapping) or schema.get("type") not in types_of_objects:
        return tool
    return {**tool, "inputSchema": {**schema, "type": "object"}}


def _is_known_tool(tool: Any, types: Any) -> bool:
    problem = _problem_of(tool, types)
    if problem:
        name = tool.get("name") if isinstance(tool, Mapping) else tool
        logger.warning("mcp: the tool %.80s is left out: %s", name, problem)
    return not problem


def _problem_of(tool: Any, types: Any) -> str:
    from pydantic import ValidationError

    try:
        valid_tool = types.Tool.model_validate(tool, by_name=False)
    except ValidationError as error:
        [problem, *_] = error.errors()
        place = ".".join(map(str, problem["loc"]))
        return f"{place}: {problem['msg']}"
    kind = valid_tool.input_schema.get("type")
    if kind != "object":
        return f"inputSchema.type is {kind!r}; arguments are an object"
    return ""


def _known_part(part: Any, types: Any) -> Any:
    """The part, or a text that names it if the client doesn't know its kind."""
    from pydantic import TypeAdapter, ValidationError

    try:
        TypeAdapter(types.ContentBlock).validate_python(part, by_name=False)
    except ValidationError:
        return _named(part)
    return part


def _named(part: Any) -> dict[str, Any]:
    described = part if isinstance(part, Mapping) else {}
    if described.get("type") == "text":
        return {"type": "text", "text": str(described.get("text") or "")}
    kind = str(described.get("type", "part"))
    mime_type = str(described.get("mimeType") or "unknown type")
    return {"type": "text", "text": f"[{kind[:40]} left out: {mime_type[:80]}]"}
