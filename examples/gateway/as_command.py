"""The same agent as with_openai.py, as a program without any library: the task comes on stdin, base URL and
key in variables, and the last line that it prints is its answer."""

from __future__ import annotations

import json
import os
import re
import sys
import urllib.request
from typing import Any

CALCULATOR = {
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


def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The model's next message."""
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, "tools": [CALCULATOR]}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as response:
        message: dict[str, Any] = json.load(response)["choices"][0]["message"]
    return message


def multiplied(arguments: str) -> str:
    """The result of a call such as `{"expression": "12 * 34"}`."""
    factors = re.fullmatch(r"(\d{1,6}) \* (\d{1,6})", str(json.loads(arguments).get("expression")))
    if factors is None:
        return "error: write it as 12 * 34"
    return str(int(factors[1]) * int(factors[2]))


def main() -> None:
    messages = list(json.loads(sys.stdin.readline())["prompt"])
    text = ""
    for _ in range(MAX_REQUESTS):
        message = ask(messages)
        messages.append(message)
        text = message["content"] or ""
        calls = message.get("tool_calls") or []
        for call in calls:
            result = multiplied(call["function"]["arguments"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        if not calls:
            break
    print(json.dumps({"answer": text}))


if __name__ == "__main__":
    main()
