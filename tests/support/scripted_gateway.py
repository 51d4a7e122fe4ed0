"""A gateway on loopback with one session, whose model answers by a script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp

from turnwise.batching.samples import build_samples
from turnwise.chat.template import ChatTemplate
from turnwise.chat.tool_calls import find_parser
from turnwise.chat.tree import ConversationTree
from turnwise.gateway.server import Gateway, GatewaySettings
from turnwise.gateway.sessions import EpisodeSession, SessionRules, Sessions
from turnwise.testing.fakes import ScriptedServer, byte_tokenizer
from turnwise.types import SamplingParams, Task, Trajectory

RULES = SessionRules({"policy": "trained", "claude-*": "trained", "titles": "untrained"})
SETTINGS = GatewaySettings(keep_alive_s=0.02)
CHAT = "/v1/chat/completions"
TASK = Task("t", "T", "train", 0)
_QWEN3 = Path(__file__).parents[1] / "data" / "chat_templates" / "qwen3.jinja"


@cache
def tool_template() -> ChatTemplate:
    """Qwen3's template over bytes: it has tools and thinking."""
    marks = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    return ChatTemplate(byte_tokenizer(marks, _QWEN3.read_text(), eos_token="<|im_end|>"))


class HeldReplies(ScriptedServer):
    """A server with scripted texts, which answers while its `gate` is open."""

    def __init__(self, replies: Sequence[str] | Callable[[int], str], fault: Exception | None = None) -> None:
        self.fault = fault
        self.gate = asyncio.Event()
        self.gate.set()
        self.num_waiting = 0
        template = tool_template()
        numbers: Iterator[int] = iter(range(10**9))
        reply_of = replies if callable(replies) else list(replies).__getitem__
        super().__init__(lambda request: template.respond(reply_of(next(numbers))))

    async def generate(self, *args: Any, **options: Any) -> Any:
        self.num_waiting += 1
        await self.gate.wait()
        if self.fault is not None:
            raise self.fault
        return await super().generate(*args, **options)


@dataclass
class Scripted:
    """What a test talks to."""

    gateway: Gateway
    sessions: Sessions
    session: EpisodeSession
    server: HeldReplies
    http: aiohttp.ClientSession

    @property
    def tree(self) -> ConversationTree:
        return self.session.tree

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.session.key}"}

    async def post(
        self,
        body: Mapping[str, Any] | bytes,
        path: str = CHAT,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, Any]:
        """Status and JSON of a request's answer."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", **self.headers, **(headers or {})}
        async with self.http.post(self.gateway.url + path, data=content, headers=sent) as response:
            return response.status, await response.json()

    async def chat(self, *texts: str, **fields: Any) -> tuple[int, Any]:
        """Asks with a user's message for each text."""
        messages = [{"role": "user", "content": text} for text in texts]
        return await self.post({"model": "policy", "messages": messages, **fields})

    def trajectory(self) -> Trajectory:
        trajectory = self.tree.trajectory(TASK, 0)
        trajectory.samples = build_samples(trajectory)
        return trajectory

    def trained_turns(self) -> list[int]:
        spans = [span for sample in self.trajectory().samples for span in sample.turn_spans]
        return sorted(span.turn for span in spans)


def scripted_tree(server: ScriptedServer, name: str = "e", **options: Any) -> ConversationTree:
    template = tool_template()
    sampling = SamplingParams(max_new_tokens=256, seed=3)
    parser = find_parser(None, template)
    return ConversationTree(template, server, name, sampling, 8192, parser=parser, **options)


@asynccontextmanager
async def scripted_gateway(
    replies: Sequence[str] | Callable[[int], str] = (),
    settings: GatewaySettings = SETTINGS,
    max_turns: int | None = None,
    **rules: Any,
) -> AsyncIterator[Scripted]:
    server = HeldReplies(replies)
    sessions = Sessions()
    gateway = Gateway(sessions, settings)
    await gateway.start()
    session = sessions.open(scripted_tree(server, max_turns=max_turns), replace(RULES, **rules), "e")
    async with aiohttp.ClientSession() as http:
        try:
            yield Scripted(gateway, sessions, session, server, http)
        finally:
            server.gate.set()
            await sessions.end(session)
            await gateway.close()
