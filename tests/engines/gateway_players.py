"""What scripts of clients and agent frameworks share: a scripted model behind the gateway, and the check of
the contexts that a client makes. It imports no client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

from scripted_gateway import Scripted, scripted_gateway

THINKING = "<think>\nhm\n</think>\n\n"


def call(name: str, **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


SUMS = [
    f"{THINKING}Let me see.{call('add', a=1, b=2)}{call('add', a=3, b=4)}",
    call("add", a=3, b=7),
    "It is 10.",
]
SUM_PARENTS = [None, 0, 1]


class Addresses:
    """Where clients reach the session."""

    def __init__(self, scripted: Scripted) -> None:
        self.key = scripted.session.key
        self.openai = f"{scripted.gateway.url}/v1"
        self.anthropic = scripted.gateway.url
        self.with_key = f"{scripted.gateway.base_url(self.key)}/v1"


def played(
    replies: Sequence[str] | Callable[[int], str],
    play: Callable[[Addresses], Any],
    parents: Sequence[int | None],
    held_s: float = 0.0,
) -> Any:
    """What a client returns, after a check of the contexts: `parents` of all turns, each trained once. The
    model answers after `held_s` seconds."""

    async def run() -> Any:
        async with scripted_gateway(replies) as scripted:
            if held_s:
                scripted.server.gate.clear()
                asyncio.get_running_loop().call_later(held_s, scripted.server.gate.set)
            result = await asyncio.to_thread(play, Addresses(scripted))
            turns = scripted.tree.turns
            assert [turn.parent for turn in turns] == list(parents), [turn.parent for turn in turns]
            assert scripted.trained_turns() == list(range(len(turns)))
            scripted.tree.verify()
            return result

    return asyncio.run(run())
