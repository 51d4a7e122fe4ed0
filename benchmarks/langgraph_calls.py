"""CPU time of one call of the model in a graph of LangGraph: ours, and LangGraph's own.

    python benchmarks/langgraph_calls.py [--episodes 20] [--calls 10]

Episodes of `create_agent` with one tool are played over a scripted server, which takes next to no time. The
same episodes played by `tool_agent`, which asks for the same tokens, are printed beside them, and so is what
a call costs between the graph's request and its answer, in our code alone. The best of five is taken. Needs
the extra `langgraph`.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable

from toy import parse_arguments

from turnwise.agents.model_calls import ModelCalls
from turnwise.agents.react_agent import ReactAgentLoop
from turnwise.agents.single_turn_agent import RowAgentSettings
from turnwise.agents.tool_agent import ToolAgent, ToolAgentLimits
from turnwise.chat.contexts import TokenContexts
from turnwise.chat.template import ChatTemplate
from turnwise.chat.tool_calls import find_parser
from turnwise.protocols import AgentLoop
from turnwise.testing.fakes import ScriptedServer, byte_tokenizer
from turnwise.tools.calculator import calculator
from turnwise.tools.function_tool import FunctionTool
from turnwise.tools.tool_box import OfferedTool, ToolBox
from turnwise.types import SamplingParams, Task

CHATML = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATE = ChatTemplate(byte_tokenizer(), CHATML)
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "12 * 7"}}</tool_call>'
TASK = Task("train/data/0", "data", "train", 0, payload={"prompt": "12 * 7?"})


def agents() -> dict[str, AgentLoop]:
    box = ToolBox([OfferedTool(FunctionTool(calculator))], timeout_s=60.0)
    settings, limits = RowAgentSettings(), ToolAgentLimits()
    return {
        "graph": ReactAgentLoop(settings, tools=box, limits=limits),
        "tool_agent": ToolAgent(settings, tools=box, limits=limits),
    }


def cpu_s(agent: AgentLoop, episodes: int, calls: int) -> float:
    """Seconds of CPU for one call of the model, the tool's answer included."""
    responses = [TEMPLATE.respond(CALL)] * (calls - 1) + [TEMPLATE.respond("84")]

    async def play() -> None:
        for number in range(episodes):
            server = ScriptedServer(list(responses))
            contexts = TokenContexts(TEMPLATE, server, 2**15, f"e{number}", find_parser("hermes", TEMPLATE))
            await agent.run(TASK, 0, contexts, SamplingParams(max_new_tokens=256))
            await contexts.close()

    started = time.process_time()
    asyncio.run(play())
    return (time.process_time() - started) / (episodes * calls)


def best(measure: Callable[[], float]) -> float:
    return min(measure() for _ in range(5))


def in_our_code(episodes: int, calls: int) -> float:
    """Seconds of CPU for one call between the graph's request and its answer, LangChain's part left out."""
    spent = 0.0
    plain = ModelCalls.answer

    async def timed(self: ModelCalls, *arguments: object) -> object:
        nonlocal spent
        started = time.process_time()
        answer = await plain(self, *arguments)
        spent += time.process_time() - started
        return answer

    ModelCalls.answer = timed
    try:
        cpu_s(agents()["graph"], episodes, calls)
    finally:
        ModelCalls.answer = plain
    return spent / (episodes * calls)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--calls", type=int, default=10)
    options = parse_arguments(parser, episodes=1, calls=2)
    sizes = options.episodes, options.calls
    for name, agent in agents().items():
        print(f"{name}: {1e3 * best(lambda agent=agent: cpu_s(agent, *sizes)):.2f} ms of CPU a call")
    print(f"of the graph's, in our code: {1e3 * best(lambda: in_our_code(*sizes)):.2f} ms")


if __name__ == "__main__":
    main()
