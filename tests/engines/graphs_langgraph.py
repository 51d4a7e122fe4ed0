"""Episodes of real graphs of LangGraph over a scripted server. Runs in the environment of LangGraph."""

from __future__ import annotations

import asyncio
import operator
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypedDict

import numpy as np
import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import Send
from pydantic import BaseModel
from toy_tools import TOOL_CHATML, Notebook, divide
from toy_users import Asker

from turnwise.agents.langgraph_messages import as_openai
from turnwise.agents.langgraph_model import ChatModel
from turnwise.agents.model_calls import ModelCalls, RequestSettings
from turnwise.agents.react_agent import ReactAgentLoop
from turnwise.agents.single_turn_agent import RowAgentSettings
from turnwise.agents.tool_agent import ToolAgent, ToolAgentLimits
from turnwise.batching.samples import build_samples
from turnwise.chat.contexts import TokenContexts
from turnwise.chat.template import ChatTemplate
from turnwise.chat.tool_calls import find_parser
from turnwise.errors import BlockingFault, EnvironmentFault, RequestError, RolloutError
from turnwise.protocols import AgentLoop
from turnwise.testing.fakes import ScriptedServer, byte_tokenizer
from turnwise.tools.function_tool import FunctionTool
from turnwise.tools.interactions import Interactions
from turnwise.tools.tool_box import OfferedTool, ToolBox
from turnwise.types import SamplingParams, Task, Trajectory

TASK = Task(id="train/data/0", tag="data", split="train", seed=0, payload={"prompt": "6 / 3?"})
TEMPLATE = ChatTemplate(byte_tokenizer(), TOOL_CHATML)
SAMPLING = SamplingParams(max_new_tokens=256)
DIVIDE = '<tool_call>{"name": "divide", "arguments": {"a": 6, "b": 3}}</tool_call>'
NOTE = '<tool_call>{"name": "note", "arguments": {"text": "x"}}</tool_call>'


class Episode:
    """What was played, and what the server was asked."""

    def __init__(self, trajectory: Trajectory, server: ScriptedServer) -> None:
        self.trajectory = trajectory
        self.server = server

    @property
    def contexts(self) -> list[list[int]]:
        """The turns that each sample of the trajectory trains."""
        return [[span.turn for span in sample.turn_spans] for sample in build_samples(self.trajectory)]

    @property
    def prompts(self) -> list[str]:
        return [TEMPLATE.decode(request.prompt_ids, False) for request in self.server.requests]


def play(
    loop: AgentLoop, responses: Iterable[str], task: Task = TASK, max_length: int = 4096, cut: int = 256
) -> Episode:
    server = ScriptedServer([TEMPLATE.respond(response) for response in responses])
    contexts = TokenContexts(TEMPLATE, server, max_length, "episode", find_parser("hermes", TEMPLATE))

    async def episode() -> list[Trajectory]:
        try:
            return await loop.run(task, 0, contexts, SamplingParams(max_new_tokens=cut))
        finally:
            contexts.verify()
            await contexts.close()

    [trajectory] = asyncio.run(episode())
    return Episode(trajectory, server)


def react(make_graph: Callable[..., Any] | None = None, kind: Any = ReactAgentLoop, **options: Any) -> Any:
    tools = [OfferedTool(FunctionTool(divide)), OfferedTool(Notebook())]
    settings = RowAgentSettings(max_assistant_turns=options.pop("max_assistant_turns", None))
    return kind(
        settings,
        tools=ToolBox(tools, timeout_s=60.0),
        limits=ToolAgentLimits(options.pop("max_parallel_calls", 1), options.pop("max_length", 1024)),
        make_graph=make_graph,
        **options,
    )


@pytest.mark.parametrize(
    ("responses", "max_parallel_calls"),
    [
        (["Let me see. " + DIVIDE, "2"], 1),
        ([DIVIDE + DIVIDE + NOTE, NOTE, "2"], 2),
        (["<think>hm</think>\n" + DIVIDE, "<think>so</think>\n2"], 1),
        ([DIVIDE.replace("divide", "divine").replace("6", '"a"'), DIVIDE.replace("3", "0"), "2"], 1),
    ],
    ids=["text beside a call", "parallel calls, one too many", "thinking", "mistakes"],
)
def test_the_default_graph_asks_what_tool_agent_asks(responses: list[str], max_parallel_calls: int) -> None:
    graph = play(react(max_parallel_calls=max_parallel_calls), responses)
    tools = [OfferedTool(FunctionTool(divide)), OfferedTool(Notebook())]
    limits = ToolAgentLimits(max_parallel_calls)
    plain = play(ToolAgent(RowAgentSettings(), tools=ToolBox(tools, 60.0), limits=limits), responses)
    known = [prompt.replace("divine", "divide") for prompt in graph.prompts]
    if "divine" not in responses[0]:  # LangChain has a sentence of its own for an unknown tool
        assert known == plain.prompts
    assert len(graph.prompts) == len(plain.prompts)
    assert graph.contexts == [list(range(len(responses)))]
    trajectory = graph.trajectory
    assert (trajectory.status, trajectory.limit) == ("finished", None)
    assert trajectory.score == plain.trajectory.score
    assert trajectory.metrics["tool_calls"] == plain.trajectory.metrics["tool_calls"]
    [sample] = build_samples(trajectory)
    [of_plain] = build_samples(plain.trajectory)
    if known == plain.prompts:
        assert np.array_equal(sample.token_ids, of_plain.token_ids)
        assert np.array_equal(sample.response_mask, of_plain.response_mask)


def test_a_call_that_can_not_be_read_is_answered_by_a_user() -> None:
    episode = play(react(), ["<tool_call>{no</tool_call>", "2"])
    assert episode.contexts == [[0, 1]] and "<|im_start|>user" in episode.prompts[1].partition("{no")[2]
    assert episode.trajectory.metrics["unreadable_calls"] == 1


@tool
def calculate(a: int, b: int) -> str:
    """Computes.

    Args:
        a: One number.
        b: Another one.
    """
    if b == 0:
        raise ValueError("b is 0")
    return "x" * a


class Own(ReactAgentLoop):
    prepared = 0

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any, **kwargs: Any) -> None:
        cls.tools = [calculate]


def calculated(a: int, b: int) -> str:
    return f'<tool_call>{{"name": "calculate", "arguments": {{"a": {a}, "b": {b}}}}}</tool_call>'


def test_tools_of_the_class_have_the_limits_of_a_rows_tools() -> None:
    Own.init_class(None, None)
    said = [calculated(99, 1) + calculated(9, 2), calculated(1, 0), "done"]
    episode = play(react(kind=Own, max_length=40), said)
    assert "x" * 20 + "...(truncated)..." + "x" * 20 in episode.prompts[1]
    assert "not executed: at most 1 call a turn" in episode.prompts[1]
    assert "Error executing 'calculate': b is 0" in episode.prompts[2]
    assert episode.contexts == [[0, 1, 2]]


class State(MessagesState):
    notes: Annotated[list[str], operator.add]


class Given(TypedDict):
    worker: int
    notes: Annotated[list[str], operator.add]


def branching(model: ChatModel, tools: Sequence[Any]) -> Any:
    """A loop with tools, then two workers at once in a sub-graph each, then a summary."""
    bound = model.bind_tools(tools)

    async def agent(state: State) -> Any:
        return {"messages": [await bound.ainvoke([SystemMessage("S"), *state["messages"]])]}

    async def work(state: Any) -> Any:
        answer = await model.ainvoke([HumanMessage(f"worker {state['worker']}")])
        return {"notes": [answer.content]}

    async def sum_up(state: State) -> Any:
        asked = [SystemMessage("S"), *state["messages"], HumanMessage("sum")]
        return {"messages": [await bound.ainvoke(asked)]}

    def route(state: State) -> Any:
        if state["messages"][-1].tool_calls:
            return "tools"
        return [Send("worker", {"worker": number}) for number in (1, 2)]

    worker = StateGraph(Given)
    worker.add_node("work", work)
    worker.add_edge(START, "work")
    graph = StateGraph(State)
    graph.add_node("agent", agent)
    graph.add_node("tools", ToolNode(tools))
    graph.add_node("worker", worker.compile())
    graph.add_node("sum_up", sum_up)
    graph.add_edge(START, "agent")
    graph.add_conditional_edges("agent", route, ["tools", "worker"])
    graph.add_edge("tools", "agent")
    graph.add_edge("worker", "sum_up")
    return graph.compile()


def test_a_loop_a_branch_and_workers_at_once_are_trained_token_by_token() -> None:
    by_last_words = {
        "6 / 3?": [DIVIDE],
        "2.0": ["so 2"],
        "worker 1": ["one"],
        "worker 2": ["two"],
        "sum": ["2"],
    }

    def script(request: Any) -> list[int]:
        prompt = TEMPLATE.decode(request.prompt_ids, False)
        last = prompt.rpartition("<|im_end|>")[0].rpartition("\n")[2]
        return TEMPLATE.respond(by_last_words[last].pop(0))

    server = ScriptedServer(script)
    contexts = TokenContexts(TEMPLATE, server, 4096, "episode", find_parser("hermes", TEMPLATE))
    [trajectory] = asyncio.run(react(branching).run(TASK, 0, contexts, SAMPLING))
    contexts.verify()
    texts = [turn.text for turn in trajectory.turns]
    samples = build_samples(trajectory)
    trained = sorted(tuple(texts[span.turn] for span in sample.turn_spans) for sample in samples)
    assert trained == [(DIVIDE, "so 2", "2"), ("one",), ("two",)]
    assert trajectory.answer_turn == texts.index("2")
    for sample in samples:
        ids = [sample.token_ids[span.start : span.stop].tolist() for span in sample.turn_spans]
        assert "".join(map(TEMPLATE.decode, ids)) == "".join(texts[span.turn] for span in sample.turn_spans)
        assert int(sample.response_mask.sum()) == sum(span.stop - span.start for span in sample.turn_spans)


def test_messages_may_be_copied_trimmed_and_checkpointed() -> None:
    def make(model: ChatModel, tools: Sequence[Any]) -> Any:
        async def agent(state: MessagesState) -> Any:
            messages = [message.model_copy(update={"id": None}) for message in state["messages"]]
            return {"messages": [await model.ainvoke(messages)]}

        async def again(state: MessagesState) -> Any:
            asked = [HumanMessage("again")]
            if len(state["messages"]) > 3:
                asked.insert(0, RemoveMessage(state["messages"][0].id))
            return {"messages": asked}

        graph = StateGraph(MessagesState)
        graph.add_node("agent", agent)
        graph.add_node("again", again)
        graph.add_edge(START, "agent")
        graph.add_conditional_edges("agent", lambda s: END if s["messages"][-1].content == "c" else "again")
        graph.add_edge("again", "agent")
        return graph.compile(checkpointer=InMemorySaver())

    assert play(react(make), ["a", "b", "c"]).contexts == [[0, 1], [2]]


def simple(node: Callable[[ChatModel, Any], Any]) -> Callable[..., Any]:
    """A graph of one node, which is called with the model and the state."""

    def make(model: ChatModel, tools: Sequence[Any]) -> Any:
        graph = StateGraph(MessagesState)
        if asyncio.iscoroutinefunction(node):

            async def run(state: MessagesState) -> Any:
                return await node(model, state)

            graph.add_node("node", run)
        else:
            graph.add_node("node", lambda state: node(model, state))
        graph.add_edge(START, "node")
        return graph.compile()

    return make


class Threaded(ReactAgentLoop):
    runs_in_thread = True


class OnlyInvoke:
    def __init__(self, graph: Any) -> None:
        self._graph = graph

    def invoke(self, inputs: Any, config: Any) -> Any:
        return self._graph.invoke(inputs, config)


def synchronous(model: ChatModel, state: Any) -> Any:
    first = model.invoke(state["messages"])
    batch = model.batch([[HumanMessage("b")], [HumanMessage("b")]])
    [chunk] = list(model.stream([HumanMessage("s")]))
    return {"messages": [first, HumanMessage(str(len(batch)) + chunk.content)]}


@pytest.mark.parametrize("kind", [ReactAgentLoop, Threaded])
def test_synchronous_nodes_and_graphs_play_in_threads(kind: type) -> None:
    episode = play(react(simple(synchronous), kind), ["same"] * 4)
    assert len(episode.trajectory.turns) == 4 and episode.trajectory.answer_turn is not None


def test_a_graph_with_invoke_alone_plays_in_a_thread_with_its_tools() -> None:
    loop = react(lambda model, tools: OnlyInvoke(create_agent(model, tools)))
    assert play(loop, [DIVIDE, "2"]).contexts == [[0, 1]]


async def blocking(model: ChatModel, state: Any) -> Any:
    return {"messages": [model.invoke(state["messages"])]}


async def raising(model: ChatModel, state: Any) -> Any:
    await model.ainvoke(state["messages"])
    raise KeyError("a fault of the graph")


async def answering_alone(model: ChatModel, state: Any) -> Any:
    return {"messages": [AIMessage("2")]}


async def ending_with_an_answer(model: ChatModel, state: Any) -> Any:
    return {"messages": [await model.ainvoke([*state["messages"], AIMessage("2")])]}


async def with_a_picture(model: ChatModel, state: Any) -> Any:
    part = {"type": "image_url", "image_url": {"url": "x"}}
    return {"messages": [await model.ainvoke([HumanMessage([part])])]}


@pytest.mark.parametrize(
    ("node", "fault", "words"),
    [
        (blocking, BlockingFault, "ainvoke"),
        (raising, KeyError, "a fault of the graph"),
        (answering_alone, EnvironmentFault, "without calling the model"),
        (ending_with_an_answer, RequestError, "assistant"),
        (with_a_picture, RequestError, "image_url"),
    ],
)
def test_a_graph_that_goes_wrong_fails_its_episode(node: Any, fault: type[Exception], words: str) -> None:
    with pytest.raises(fault, match=words):
        play(react(simple(node)), ["2"])


@pytest.mark.parametrize(
    ("graph", "words"),
    [
        (lambda model, tools: OnlyInvoke(_Returning("2")), "messages"),
        (lambda model, tools: OnlyInvoke(_Returning({"messages": ["2"]})), "messages"),
        (lambda model, tools: StateGraph(MessagesState), "compile"),
        (lambda model, tools: create_agent(model, [*tools, *tools]) and None, "ainvoke"),
    ],
)
def test_what_is_no_graph_and_no_state_is_refused(graph: Any, words: str) -> None:
    with pytest.raises(EnvironmentFault, match=words):
        play(react(graph), ["2"])


class _Returning:
    def __init__(self, state: Any) -> None:
        self._state = state

    def invoke(self, inputs: Any, config: Any) -> Any:
        return self._state


def test_limits_truncate() -> None:
    steps = play(react(max_assistant_turns=2), [DIVIDE] * 3).trajectory
    assert (steps.status, steps.limit, len(steps.turns)) == ("truncated", "max_steps", 2)
    first = play(react(), ["2"]).trajectory.turns[0].num_tokens
    for room in (len(DIVIDE) + 20, len(DIVIDE) + 60):  # none for the result, little for the answer
        full = play(react(), [DIVIDE, "x" * 200], max_length=first + room).trajectory
        assert (full.status, full.limit) == ("truncated", "sequence_length")
    cut = play(react(), ["x" * 50], cut=8).trajectory
    assert (cut.status, cut.limit) == ("truncated", "max_new_tokens")
    with pytest.raises(RolloutError, match="sequence_length"):
        play(react(), ["2"], max_length=64)


def test_a_graph_that_loops_without_the_model_ends() -> None:
    def endless(model: ChatModel, tools: Sequence[Any]) -> Any:
        async def first(state: MessagesState) -> Any:
            return {"messages": [await model.ainvoke(state["messages"])]}

        graph = StateGraph(MessagesState)
        graph.add_node("first", first)
        graph.add_node("again", lambda state: {})
        graph.add_edge(START, "first")
        graph.add_edge("first", "again")
        graph.add_edge("again", "again")
        return graph.compile()

    trajectory = play(react(endless, max_assistant_turns=2), ["2"]).trajectory
    assert (trajectory.status, trajectory.limit) == ("truncated", "max_steps")


def test_a_mistake_ends_the_episode_with_its_reward() -> None:
    requests = RequestSettings(mistakes=(KeyError,), mistake_reward=-0.5)
    trajectory = play(react(simple(raising), requests=requests), ["2"]).trajectory
    assert (trajectory.status, trajectory.score) == ("finished", -0.5)
    assert trajectory.metrics["mistakes"] == 1


def test_a_simulated_user_answers_the_end_of_the_graph() -> None:
    payload = {"prompt": "6 / 3?", "extra_info": {"interaction_kwargs": {"name": "asker"}}}
    task = Task(id="t", tag="data", split="train", seed=0, payload=payload)
    episode = play(react(interactions=Interactions({"asker": Asker()})), ["a", "b", "c"], task)
    assert episode.contexts == [list(range(len(episode.trajectory.turns)))]
    assert len(episode.trajectory.turns) > 1


class Ask(BaseModel):
    """Asks."""

    text: str


async def asks_for_more(model: ChatModel, state: Any) -> Any:
    warm = model.bind_tools([Ask, divide, calculate], tool_choice="any").bind(temperature=0.1, stop=["END"])
    answer = await warm.ainvoke(state["messages"])
    assert answer.content == "Well, "
    assert answer.response_metadata["finish_reason"] == "stop"
    usage = answer.usage_metadata
    assert usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"]
    wrong = await warm.ainvoke([*state["messages"], answer, HumanMessage("call it")])
    [invalid] = wrong.invalid_tool_calls
    assert invalid["args"] == "<tool_call>{no</tool_call>" and invalid["error"]
    [chunk] = [chunk async for chunk in warm.astream([*state["messages"], answer, HumanMessage("more")])]
    assert chunk.tool_calls[0]["name"] == "Ask"
    return {"messages": [answer]}


def test_what_a_call_asks_for_and_gets(caplog: pytest.LogCaptureFixture) -> None:
    ask = '<tool_call>{"name": "Ask", "arguments": {"text": "x"}}</tool_call>'
    said = ["Well, END of it", "<tool_call>{no</tool_call>", ask]
    episode = play(react(simple(asks_for_more)), said)
    assert [turn.parent for turn in episode.trajectory.turns] == [None, 0, 0]
    assert episode.trajectory.metrics["calls/unenforced"] == episode.trajectory.metrics["calls/ignored"] == 3
    assert sum("tool_choice" in record.message for record in caplog.records) == 1
    assert sum("temperature" in record.message for record in caplog.records) >= 1
    assert episode.server.requests[0].sampling.temperature == 1.0
    with pytest.raises(RequestError, match=r"gateway\.strict"):
        play(react(simple(asks_for_more), requests=RequestSettings(is_strict=True)), said)
    warm = play(react(simple(asks_for_more), requests=RequestSettings(takes_temperature=True)), said)
    assert warm.server.requests[0].sampling.temperature == 0.1


def test_messages_of_all_kinds_become_openais() -> None:
    call = {"name": "divide", "args": {"a": 1}, "id": "c1", "type": "tool_call"}
    parts = [{"type": "reasoning", "reasoning": "hm"}, {"type": "text", "text": "so"}, {**call}]
    messages = [
        SystemMessage("S"),
        HumanMessage(["a", {"type": "text", "text": "b"}]),
        AIMessage(parts, tool_calls=[call]),
        ToolMessage("2", tool_call_id="c1", status="error", artifact=3),
    ]
    assert as_openai(messages) == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "so"}],
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "divide", "arguments": {"a": 1}}}
            ],
        },
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]
    with pytest.raises(RequestError, match="RemoveMessage"):
        as_openai([RemoveMessage("x")])


def test_a_call_after_the_end_of_the_episode_is_refused() -> None:
    models: list[ChatModel] = []

    async def keep(model: ChatModel, state: Any) -> Any:
        models.append(model)
        return {"messages": [await model.ainvoke(state["messages"])]}

    play(react(simple(keep)), ["2", "3"])
    calls: ModelCalls = models[0].client
    with pytest.raises(RequestError, match="ended"):
        asyncio.run(calls._tree.answer([{"role": "user", "content": "x"}]))


async def rewriting(model: ChatModel, state: Any) -> Any:
    await model.ainvoke(state["messages"])
    changed = [*state["messages"], AIMessage("what it never said"), HumanMessage("go on")]
    return {"messages": [await model.ainvoke(changed)]}


def test_a_graph_that_rewrites_what_the_model_said_starts_a_context_with_it() -> None:
    episode = play(react(simple(rewriting)), ["a", "b"])
    assert episode.contexts == [[0], [1]]
    assert [turn.text for turn in episode.trajectory.turns] == ["a", "b"]
    assert "what it never said" in episode.prompts[1]
    assert episode.trajectory.metrics["calls/contexts/changed"] == 1


class HeldServer(ScriptedServer):
    """Answers while its `gate` is open."""

    def __init__(self, responses: Iterable[str]) -> None:
        super().__init__([TEMPLATE.respond(response) for response in responses])
        self.is_asked = asyncio.Event()
        self.gate = asyncio.Event()

    async def generate(self, *args: Any, **options: Any) -> Any:
        self.is_asked.set()
        await self.gate.wait()
        return await super().generate(*args, **options)


def test_a_call_of_the_model_that_the_graph_cancels_is_sampled_to_its_end_and_not_trained() -> None:
    async def episode() -> Trajectory:
        server = HeldServer([DIVIDE, "2"])

        async def give_up(model: ChatModel, state: Any) -> Any:
            first = asyncio.ensure_future(model.ainvoke([*state["messages"], HumanMessage("or")]))
            await server.is_asked.wait()
            first.cancel()
            server.gate.set()
            while not model.client.turns:
                await asyncio.sleep(0)
            return {"messages": [await model.ainvoke(state["messages"])]}

        contexts = TokenContexts(TEMPLATE, server, 4096, "episode", find_parser("hermes", TEMPLATE))
        [trajectory] = await react(simple(give_up)).run(TASK, 0, contexts, SAMPLING)
        contexts.verify()
        await contexts.close()
        return trajectory

    trajectory = asyncio.run(asyncio.wait_for(episode(), 60))
    assert (trajectory.status, trajectory.answer_turn) == ("finished", 1)
    assert [turn.is_trained for turn in trajectory.turns] == [False, True]
    assert trajectory.metrics["tool_calls"] == 0


def test_the_graphs_of_the_docs_play() -> None:
    page = Path(__file__).parents[2] / "docs" / "langgraph.md"
    namespace: dict[str, Any] = {"__name__": "docs"}
    for block in re.findall(
        r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    ):
        exec(block, namespace)
    assert play(react(namespace["draft_and_revise"]), ["a", "b"]).contexts == [[0, 1]]
    weather = namespace["WeatherAgent"]
    weather.init_class(None, None)
    call = '<tool_call>{"name": "celsius", "arguments": {"fahrenheit": 212}}</tool_call>'
    assert "100.0" in play(react(kind=weather), [call, "100"]).prompts[1]


if __name__ == "__main__":
    status = pytest.main([__file__, "--noconftest", "-q", "-p", "no:cacheprovider", *sys.argv[1:]])
    print(f"langgraph: real graphs ended with status {status}")
    raise SystemExit(status)
