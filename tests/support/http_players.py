"""Functions that play episodes over HTTP, as users write them: with blocking clients of their own."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any


def post(base_url: str, api_key: str, body: dict[str, Any], path: str = "/chat/completions") -> Any:
    """A request with Python's own client, which blocks."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {api_key}"}
    request = urllib.request.Request(base_url + path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        error.msg = error.read().decode()
        raise


class Mistake(Exception):
    """The model called a tool that isn't there."""


def two_turns(base_url: str, api_key: str, task: dict[str, Any], model: str) -> str:
    """Asks twice in one conversation; the answer is the last text."""
    messages = [{"role": "user", "content": task["prompt"]}]
    for _ in range(2):
        message = post(base_url, api_key, {"model": model, "messages": messages})["choices"][0]["message"]
        messages += [message, {"role": "user", "content": "again"}]
    return str(messages[-2]["content"])


def openai_client(base_url: str, api_key: str, task: dict[str, Any], model: str) -> str:
    """Asks once, with the official client."""
    import openai

    with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        messages: Any = [{"role": "user", "content": task["prompt"]}]
        answer = client.chat.completions.create(model=model, messages=messages)
    return answer.choices[0].message.content or ""


def letters(base_url: str, api_key: str, task: dict[str, Any], model: str, env: Any) -> None:
    """Plays an environment until its episode is over."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": task["prompt"]}]
    while True:
        message = post(base_url, api_key, {"model": model, "messages": messages})["choices"][0]["message"]
        step = env.step(message["content"])
        if step.terminated or step.truncated:
            return
        messages += [message, {"role": "user", "content": step.observation}]


def wishful(base_url: str, api_key: str, task: dict[str, Any], model: str) -> str:
    """Asks for what a run doesn't grant."""
    body = {"model": model, "messages": [{"role": "user", "content": task["prompt"]}], "n": 2}
    wishes = {"temperature": 0.01, "response_format": {"type": "json_object"}}
    return str(post(base_url, api_key, body | wishes)["choices"][0]["message"]["content"])


def mistaken(base_url: str, api_key: str, task: dict[str, Any], model: str) -> None:
    """Ends with a mistake of the model."""
    two_turns(base_url, api_key, task, model)
    raise Mistake("add2")


def needs_more(base_url: str, api_key: str, task: dict[str, Any], cookie: str) -> None:
    """Needs something that nobody gives."""


def forked(base_url: str, api_key: str, task: dict[str, Any], model: str) -> float:
    """Goes on from its first answer in two ways, and scores itself."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": task["prompt"]}]
    message = post(base_url, api_key, {"model": model, "messages": messages})["choices"][0]["message"]
    for text in ("again", "do"):
        both = [*messages, message, {"role": "user", "content": text}]
        post(base_url, api_key, {"model": model, "messages": both})
    return 0.5
