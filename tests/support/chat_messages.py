"""Chat messages, and schemas of tools, as OpenAI writes them."""

from __future__ import annotations

from functools import partial
from typing import Any

LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
"""A chat template with blanks around the text of a response."""


def message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


system, user, assistant = (partial(message, role) for role in ("system", "user", "assistant"))


def tool(name: str, description: str, **parameters: str | dict[str, Any]) -> dict[str, Any]:
    """A schema; the value of a parameter is its type, or all that is said of it."""
    properties = {key: {"type": kind} if isinstance(kind, str) else kind for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}
