"""The text that the model reads in place of the result of an MCP tool."""

import json
from typing import Any


def text_of(result: Any) -> str:
    """A result (`mcp.types.CallToolResult`) as text: its parts one below the other, and then the structured
    content as JSON unless the parts say the same. "" if it has neither."""
    parts = [_text_of_part(part) for part in result.content]
    structured = result.structured_content
    if structured is not None and not _is_copy(parts, structured):
        parts.append(json.dumps(structured, ensure_ascii=False))
    return "\n".join(part for part in parts if part)


def _text_of_part(part: Any) -> str:
    if part.type == "text":
        return str(part.text)
    if part.type == "resource_link":
        return _link(part)
    if part.type != "resource":
        return _left_out(part.type, part.mime_type, part.data)
    resource = part.resource
    match resource.model_dump():
        case {"text": text}:
            return str(text)
        case {"blob": blob}:
            return _left_out(f"resource {resource.uri}", resource.mime_type, blob)
    return f"[resource {resource.uri} left out]"


def _link(part: Any) -> str:
    link = f"{part.name} ({part.uri})"
    if part.description:
        link += f": {part.description}"
    return link


def _left_out(kind: str, mime_type: str | None, base64: str) -> str:
    """What stands for a part that can't be shown: its kind, type and size."""
    num_bytes = len(base64) * 3 // 4 - base64[-2:].count("=")
    return f"[{kind} left out: {mime_type or 'unknown type'}, {num_bytes:,} bytes]"


def _is_copy(parts: list[str], structured: Any) -> bool:
    """Whether the parts say the same as the structured content. Servers wrap what isn't an object as
    `{"result": …}`, and write a list as one part for each item."""
    content = structured
    if isinstance(structured, dict) and structured.keys() == {"result"}:
        content = structured["result"]
    if content is None:
        return True
    whole = "\n".join(parts)
    values = [_value_of(part) for part in parts]
    candidates = [whole, _value_of(whole), *values]
    if parts:
        candidates += [parts, values]
    return any(_equal(candidate, structured) or _equal(candidate, content) for candidate in candidates)


def _value_of(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _equal(first: Any, second: Any) -> bool:
    """Equal as JSON, where true isn't 1."""
    if type(first) is not type(second):
        return False
    return json.dumps(first, sort_keys=True) == json.dumps(second, sort_keys=True)
