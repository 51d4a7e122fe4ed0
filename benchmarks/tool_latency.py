"""What slow tools cost a batch of conversations: `python benchmarks/tool_latency.py`.

64 conversations of five responses (32 tokens each, preset `tiny`, embedded server), with a tool call after
each of the first four. A call takes a log-normal time: median 100 ms, 99% below 2 s. Contenders:

- *tool agent*: the library's own agent and tools; each conversation goes on as soon as its own call has
ended.
- *instant tools*: the same tokens, and calls that take no time.
- *lock-step*: all conversations sample, then all calls of the round run together, then all sample again.

The bound is the longest conversation's time in tools + the wall time with instant tools: nobody can be much
faster. Rounds run in turn; ratios are medians of pairs, and the first round warms up. What the model samples
says nothing, so a parser sees a call in each of the first four responses.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from machine import describe_machine
from toy import parse_arguments
from transformers import AutoModelForCausalLM, AutoTokenizer

from turnwise.agents.single_turn_agent import RowAgentSettings
from turnwise.agents.tool_agent import ToolAgent, ToolAgentLimits
from turnwise.chat.contexts import TokenContexts
from turnwise.chat.template import ChatTemplate
from turnwise.inference.embedded.server import EmbeddedServer
from turnwise.models.make import make_model
from turnwise.protocols.tools import ParsedResponse, ToolCall
from turnwise.tools.function_tool import FunctionTool
from turnwise.tools.tool_box import OfferedTool, ToolBox
from turnwise.types import CallOptions, Completion, SamplingParams, Task

HERE = Path(__file__).parent
NUM_CALLS, NUM_TOKENS, MAX_LENGTH = 4, 32, 2048
MEDIAN_S, P99_S = 0.1, 2.0
SIGMA = 1.2879
"""ln(P99_S / MEDIAN_S) over the 99% quantile of a normal distribution, 2.326."""


async def look(seconds: float) -> str:
    """Looks a thing up.

    Args:
        seconds: How long that takes.
    """
    await asyncio.sleep(seconds)
    return "found"


class Calls:
    """Sees the next call of the conversation in a response, whatever it says."""

    def __init__(self, seconds: Sequence[float]) -> None:
        self.seconds = list(seconds)

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]]) -> ParsedResponse:
        if not self.seconds:
            return ParsedResponse(text)
        return ParsedResponse("", (ToolCall("look", {"seconds": self.seconds.pop(0)}, "abcdefghi"),))


class Server(EmbeddedServer):
    """Responses end at their length with a stop token: a tool agent would end the conversation where one was
    cut."""

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, *args: Any, **keywords: Any
    ) -> Completion:
        completion = await super().generate(
            prompt_ids, replace(sampling, stop_token_ids=()), *args, **keywords
        )
        completion.token_ids[-1] = sampling.stop_token_ids[0]
        return replace(completion, finish_reason="stop")


class Bench:
    def __init__(self, folder: Path, seed: int, num_conversations: int, median_s: float) -> None:
        made = make_model("tiny", folder, ["Looks a thing up. found seconds number object"] * 20, seed=0)
        self.model = AutoModelForCausalLM.from_pretrained(made.folder).eval()
        self.template = ChatTemplate(AutoTokenizer.from_pretrained(made.folder))
        rng = random.Random(seed)
        self.seconds = [
            [median_s * math.exp(SIGMA * rng.gauss(0, 1)) for _ in range(NUM_CALLS)]
            for _ in range(num_conversations)
        ]
        self.tools = ToolBox([OfferedTool(FunctionTool(look))])

    def contexts(self, server: EmbeddedServer, number: int, seconds: Sequence[float]) -> TokenContexts:
        return TokenContexts(self.template, server, MAX_LENGTH, f"c{number}", Calls(seconds))

    async def agents(self, is_instant: bool) -> float:
        """Seconds of all conversations by the tool agent."""
        agent = ToolAgent(
            RowAgentSettings(max_new_tokens=NUM_TOKENS), tools=self.tools, limits=ToolAgentLimits()
        )
        server = Server(self.model, max_length=MAX_LENGTH)
        started = time.perf_counter()
        found = await asyncio.gather(
            *(
                agent.run(
                    task(number),
                    0,
                    self.contexts(server, number, [0.0] * NUM_CALLS if is_instant else seconds),
                    sampling(number),
                )
                for number, seconds in enumerate(self.seconds)
            )
        )
        passed = time.perf_counter() - started
        assert all(len(trajectory.turns) == NUM_CALLS + 1 for [trajectory] in found)
        await server.close()
        return passed

    async def lock_step(self) -> float:
        """Seconds of all conversations, round by round."""
        server = Server(self.model, max_length=MAX_LENGTH)
        started = time.perf_counter()
        opened = [
            self.contexts(server, number, seconds)(
                sampling(number), tools=self.tools.schemas, encode_special_tokens=False
            )
            for number, seconds in enumerate(self.seconds)
        ]
        messages = [task(number).payload["prompt"] for number in range(len(self.seconds))]
        for turn in range(NUM_CALLS + 1):
            await asyncio.gather(
                *(c.generate(m, CallOptions(NUM_TOKENS)) for c, m in zip(opened, messages, strict=True))
            )
            if turn < NUM_CALLS:
                results = await asyncio.gather(*(look(seconds[turn]) for seconds in self.seconds))
                messages = [
                    [{"role": "tool", "name": "look", "tool_call_id": "abcdefghi", "content": text}]
                    for text in results
                ]
        passed = time.perf_counter() - started
        await server.close()
        return passed


def task(number: int) -> Task:
    return Task(
        id=str(number),
        tag="",
        split="train",
        seed=number,
        payload={"prompt": [{"role": "user", "content": f"{number}?"}]},
    )


def sampling(number: int) -> SamplingParams:
    return replace(SamplingParams(max_new_tokens=NUM_TOKENS), seed=number)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--median", type=float, default=MEDIAN_S, help="seconds of a call")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "tool_latency.json")
    options = parse_arguments(parser, rounds=1, conversations=2, median=0.001)
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder) / "model", 1, options.conversations, options.median)
        for number in range(options.rounds + 1):
            seconds = {
                "instant": asyncio.run(bench.agents(is_instant=True)),
                "agent": asyncio.run(bench.agents(is_instant=False)),
                "lock_step": asyncio.run(bench.lock_step()),
            }
            if number:
                rounds.append(seconds)
    longest = max(map(sum, bench.seconds))
    result = {
        "machine": describe_machine(),
        "longest_conversation_s": longest,
        "seconds": rounds,
        "agent_over_bound": statistics.median(r["agent"] / (longest + r["instant"]) for r in rounds),
        "lock_step_over_agent": statistics.median(r["lock_step"] / r["agent"] for r in rounds),
    }
    print(json.dumps(result, indent=2))
    options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
