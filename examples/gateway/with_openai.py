"""An agent that knows nothing of turnwise: it has a base URL, a key and OpenAI's client, asks a model for the
product of two numbers, and computes what the model asks the calculator for."""

from __future__ import annotations

import json
import re
from typing import Any

import openai

CALCULATOR: Any = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Computes an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {
                "expression": {
                    "type": "string",
                    "description": "Numbers, parentheses and the operators + - * / // % **.",
                }
            },
            "required": ["expression"],
        },
    },
}
MAX_REQUESTS = 3
CLIENT = openai.OpenAI(base_url="http://127.0.0.1", api_key="that of the episode")
"""To make a client takes as much processor time as ten requests. Episodes share its connections."""


def multiplied(arguments: str) -> str:
    """The result of a call such as `{"expression": "12 * 34"}`; a sentence for the model if it can't be
    computed."""
    try:
        expression = str(json.loads(arguments)["expression"])
    except (ValueError, KeyError, TypeError):
        return "error: the argument is `expression`"
    factors = re.fullmatch(r"(\d{1,6}) \* (\d{1,6})", expression)
    if factors is None:
        return "error: write it as 12 * 34"
    return str(int(factors[1]) * int(factors[2]))


def play(base_url: str, api_key: str, task: dict[str, Any], model: str) -> None:
    """Plays one row of examples/products. Its last response is scored by `data.reward`."""
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    messages: Any = list(task["prompt"])
    for _ in range(MAX_REQUESTS):
        answer = client.chat.completions.create(model=model, messages=messages, tools=[CALCULATOR])
        message = answer.choices[0].message
        messages.append(message)
        for call in message.tool_calls or ():
            result = multiplied(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not message.tool_calls:
            return
