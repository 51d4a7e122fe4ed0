"""Traces: every episode span by span, in the order of its events, however it ends; bounded waiting; a file
that is read again."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from toy_envs import IdentityEnv
from toy_tools import TOOL_CHATML, Notebook
from toy_users import Asker

from turnwise.agents.env_agent import EnvAgent, EnvAgentSettings
from turnwise.agents.single_turn_agent import RowAgentSettings, SingleTurnAgent
from turnwise.agents.tool_agent import ToolAgent, ToolAgentLimits
from turnwise.assemble.traces import traced_agents, traced_score
from turnwise.chat.contexts import TokenContexts
from turnwise.chat.template import ChatTemplate
from turnwise.chat.tool_calls import find_parser
from turnwise.cli.main import main
from turnwise.data.rewards import RewardManager, WeightedReward
from turnwise.errors import DataError, ServerError
from turnwise.protocols import RewardResult
from turnwise.runtime.watchdog import Watchdog
from turnwise.testing.fakes import ScriptedServer, byte_tokenizer
from turnwise.tools.interactions import Interactions
from turnwise.tools.tool_box import OfferedTool, ToolBox
from turnwise.tracking.mlflow_traces import mlflow_spans
from turnwise.tracking.spans import Span, Trace
from turnwise.tracking.traces import Traces, TraceSettings
from turnwise.tracking.traces_file import TracesFile, read_traces
from turnwise.types import Group, SamplingParams, Task, Trajectory

TEMPLATE = ChatTemplate(byte_tokenizer(), TOOL_CHATML)
ROW = Task("train/data/0", "data", "train", 0, payload={"prompt": "6 / 3?"}, agent="tool_agent", row=0)
SEEDED = Task("train/Toy/0", "Toy", "train", 0)
CALL = '<tool_call>{"name": "note", "arguments": {"text": "x"}}</tool_call>'
TAGS = {"run": "r", "experiment_name": "e"}


class Kept:
    """A store in memory."""

    place = "memory"

    def __init__(self) -> None:
        self.traces: list[Trace] = []

    def write(self, traces: Sequence[Trace]) -> list[str]:
        self.traces += traces
        return []

    def close(self) -> None: ...


def tool_agent() -> ToolAgent:
    tools = ToolBox([OfferedTool(Notebook())], timeout_s=60.0)
    return ToolAgent(RowAgentSettings(), tools=tools, limits=ToolAgentLimits())


def env_agent() -> EnvAgent:
    settings = EnvAgentSettings("Toy", max_steps=2, turn_template="{observation}")
    return EnvAgent(lambda _: IdentityEnv(), settings)


def play(traces: Traces, agent: Any, task: Task, responses: list[str], sibling: int = 0) -> Group:
    server = ScriptedServer(map(TEMPLATE.respond, responses), version=3)
    contexts = TokenContexts(TEMPLATE, server, 4096, "episode", find_parser("hermes", TEMPLATE))
    loop = traced_agents(lambda _: agent, traces)(task)
    played = asyncio.run(loop.run(task, sibling, contexts, SamplingParams(max_new_tokens=256)))
    return Group(task, played)


def traced(store: Any, settings: TraceSettings | None = None) -> Traces:
    return Traces(lambda: store, settings or TraceSettings(), TAGS)


def one(agent: Any, task: Task, responses: list[str]) -> Trace:
    store = Kept()
    traces = traced(store)
    group = play(traces, agent, task, responses)
    traces.end_step(4, [group])
    traces.close()
    [trace] = store.traces
    return trace


def kinds(trace: Trace) -> list[str]:
    return [span.kind for span in trace.spans if span.kind != "server_wait"]


def test_an_episode_with_tools_is_spans_of_its_turns_and_calls() -> None:
    trace = one(tool_agent(), ROW, [CALL, "2"])
    assert kinds(trace) == ["episode", "generate", "tool", "generate"]
    episode, first, tool, last = [span for span in trace.spans if span.kind != "server_wait"]
    assert episode.parent is None and {span.parent for span in (first, tool, last)} == {0}
    assert all(span.start_ns <= span.end_ns and not span.error for span in trace.spans)
    assert first.end_ns <= tool.end_ns <= last.end_ns <= episode.end_ns
    assert tool.attributes["gen_ai.tool.call.arguments"] == {"text": "x"}
    assert tool.attributes["gen_ai.tool.call.result"] == "x" and tool.attributes["turnwise.turn"] == 0
    read = first.attributes["gen_ai.usage.input_tokens"] + first.attributes["gen_ai.usage.output_tokens"]
    assert last.attributes["turnwise.reused_tokens"] == read and last.attributes["turnwise.parent_turn"] == 0
    assert trace.tags == TAGS | {
        "step": 4,
        "sample_index": 0,
        "validate": False,
        "task": ROW.id,
        "rollout_n": 0,
        "status": "finished",
        "score": 0.25,
    }


def test_steps_of_an_environment_carry_action_reward_and_end() -> None:
    trace = one(env_agent(), SEEDED, ["<answer>a</answer>"] * 2)
    assert kinds(trace) == ["episode", "generate", "env_step", "generate", "env_step"]
    first, last = [span for span in trace.spans if span.kind == "env_step"]
    assert first.attributes["turnwise.action"] == "a" and not first.attributes["turnwise.ended"]
    assert last.attributes["turnwise.turn"] == 1
    assert trace.tags["score"] == first.attributes["turnwise.reward"] + last.attributes["turnwise.reward"]


def test_a_failed_episode_ends_its_open_span_with_the_error() -> None:
    store = Kept()
    traces = traced(store)
    with pytest.raises(ServerError):
        play(traces, tool_agent(), ROW, [CALL])
    traces.end_step(0, [Group(ROW, [], rejected="failed")])
    traces.close()
    [trace] = store.traces
    assert kinds(trace) == ["episode", "generate", "tool", "generate"]
    assert trace.tags["status"] == "failed" and trace.spans[0].error.startswith("ServerError")
    assert trace.spans[-1].error == trace.spans[0].error


def test_a_tool_that_breaks_and_a_mistake_of_the_model_are_errors_of_their_spans() -> None:
    def noting(text: str) -> str:
        return CALL.replace('"x"', f'"{text}"')

    store = Kept()
    traces = traced(store)
    with pytest.raises(RuntimeError):
        play(traces, tool_agent(), ROW, [noting("mistake"), noting("raise")])
    traces.close()
    [trace] = store.traces
    mistake, broken = [span for span in trace.spans if span.kind == "tool"]
    assert "no such page" in mistake.error and mistake.attributes["turnwise.turn"] == 0
    assert broken.error.startswith("RuntimeError") and broken.attributes["turnwise.turn"] == 1
    assert trace.spans[0].error.startswith("RuntimeError") and len(trace.spans) == 5


@pytest.mark.parametrize("has_tools", [False, True])
def test_what_a_simulated_user_says_is_a_span(has_tools: bool) -> None:
    users = Interactions({"user": Asker()})
    agent: Any = SingleTurnAgent(RowAgentSettings(), users)
    if has_tools:
        tools = ToolBox([OfferedTool(Notebook())], timeout_s=60.0)
        agent = ToolAgent(RowAgentSettings(), tools=tools, limits=ToolAgentLimits(), interactions=users)
    task = replace(ROW, payload={"prompt": "?", "extra_info": {"interaction_kwargs": {"name": "user"}}})
    trace = one(agent, task, ["1", "2", "3"])
    assert kinds(trace) == ["episode", *["generate", "user"] * 3]
    said = [span.attributes["turnwise.user_text"] for span in trace.spans if span.kind == "user"]
    assert said == ["and question 1?", "and question 2?", ""]


def test_what_an_agent_does_between_two_requests_is_a_span_if_nothing_else_is_known() -> None:
    class Thinks:
        async def run(self, task: Task, sibling: int, contexts: Any, sampling: Any) -> list[Trajectory]:
            conversation = contexts(sampling)
            for _ in range(2):
                await conversation.generate([{"role": "user", "content": "?"}])
                await asyncio.sleep(0.01)
            return [Trajectory(task, sibling, conversation.turns)]

    trace = one(Thinks(), ROW, ["1", "2"])
    assert sorted(kinds(trace)) == ["agent", "episode", "generate", "generate"]
    [agent] = [span for span in trace.spans if span.kind == "agent"]
    assert agent.end_ns - agent.start_ns >= 5_000_000 and agent.attributes["turnwise.turn"] == 0


def test_a_tree_is_traced_turn_by_turn_with_its_branches() -> None:
    class Branches:
        async def run(self, task: Task, sibling: int, contexts: Any, sampling: Any) -> list[Trajectory]:
            tree = contexts.open_tree(sampling)
            asked = [{"role": "user", "content": "go"}]
            first = await tree.answer(asked)
            for text in ("left", "right"):
                history = [*asked, first.message, {"role": "user", "content": text}]
                await tree.answer(history)
            return [Trajectory(task, sibling, tree.turns)]

    trace = one(Branches(), ROW, ["1", "2", "3"])
    generated = [span.attributes for span in trace.spans if span.kind == "generate"]
    assert [values["turnwise.parent_turn"] for values in generated] == [None, 0, 0]
    assert generated[1]["turnwise.reused_tokens"] == generated[2]["turnwise.reused_tokens"] > 0


def test_a_call_of_a_branch_belongs_to_the_turn_that_made_it() -> None:
    class Branches:
        async def run(self, task: Task, sibling: int, contexts: Any, sampling: Any) -> list[Trajectory]:
            tree = contexts.open_tree(sampling)
            asked = [{"role": "user", "content": "go"}]
            for text in ("left", "right"):
                await tree.answer([*asked, {"role": "user", "content": text}], tools=[Notebook().schema])
            for text in ("x", "y", "x"):  # the newest turn is the second one; nobody asked for the third call
                contexts.called("note", {"text": text}, text, 0.0)
            return [Trajectory(task, sibling, tree.turns)]

    trace = one(Branches(), ROW, [CALL, CALL.replace('"x"', '"y"')])
    called = [span.attributes["turnwise.turn"] for span in trace.spans if span.kind == "tool"]
    assert called == [0, 1, 1]


def test_a_call_that_was_never_made_takes_no_later_one() -> None:
    class Twice:
        async def run(self, task: Task, sibling: int, contexts: Any, sampling: Any) -> list[Trajectory]:
            tree = contexts.open_tree(sampling)
            for text in ("left", "right"):
                await tree.answer([{"role": "user", "content": text}], tools=[Notebook().schema])
                contexts.called("note", {"text": "x" if text == "left" else "y"}, text, 0.0)
            return [Trajectory(task, sibling, tree.turns)]

    other = CALL.replace('"x"', '"y"')
    trace = one(Twice(), ROW, [CALL + other, other])  # the first turn's second call is beyond the maximum
    called = [span.attributes["turnwise.turn"] for span in trace.spans if span.kind == "tool"]
    assert called == [0, 1]


def test_what_no_step_has_used_is_written_at_the_end() -> None:
    store = Kept()
    traces = traced(store)
    play(traces, tool_agent(), ROW, ["2"])
    traces.close()
    assert [trace.tags["task"] for trace in store.traces] == [ROW.id]


def test_each_reward_is_a_span_with_the_score_of_its_episode() -> None:
    async def double(group: Group) -> RewardResult:
        return RewardResult([2.0] * len(group.trajectories))

    store = Kept()
    traces = traced(store)
    group = play(traces, tool_agent(), ROW, ["2"])
    manager = traced_score(RewardManager([WeightedReward("double", 0.5, double)], 9.0, Watchdog()), traces)
    assert manager is not None and asyncio.run(manager(group)) == []
    traces.end_step(0, [group])
    traces.close()
    [trace] = store.traces
    reward = trace.spans[-1]
    assert (reward.kind, reward.name, reward.attributes["turnwise.reward"]) == (
        "reward",
        "reward double",
        2.0,
    )
    assert trace.tags["score"] == 1.0


def test_all_siblings_of_so_many_tasks_are_traced_and_the_seed_chooses_them() -> None:
    tasks = [Task(f"train/data/{n}", "data", "train", 0, payload=ROW.payload, row=n) for n in range(6)]

    def chosen(seed: int) -> list[tuple[str, int]]:
        store = Kept()
        traces = traced(store, TraceSettings(max_tasks=2, seed=seed))
        groups = []
        for task in tasks:
            played = [play(traces, tool_agent(), task, ["2"], sibling) for sibling in range(2)]
            groups.append(Group(task, [t for group in played for t in group.trajectories]))
        traces.end_step(0, groups)
        traces.close()
        return [(trace.tags["task"], trace.tags["rollout_n"]) for trace in store.traces]

    assert chosen(1) == chosen(1) and len({task for task, _ in chosen(1)}) == 2 and len(chosen(1)) == 4
    assert len({tuple(chosen(seed)) for seed in range(5)}) > 1


def test_what_waits_is_bounded_and_what_is_lost_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    may_write = threading.Event()

    class Slow(Kept):
        def write(self, traces: Sequence[Trace]) -> list[str]:
            may_write.wait(60)
            return super().write(traces)

    store = Slow()
    traces = traced(store, TraceSettings(max_pending_bytes=4000))
    for step in range(5):
        traces.end_step(step, [play(traces, tool_agent(), ROW, ["2"])])
    may_write.set()
    traces.close()
    assert 0 < len(store.traces) < 5
    assert caplog.text.count("trace.max_pending_mb") == 1
    assert f"{5 - len(store.traces)} episode" in caplog.text and "of 5 went without" in caplog.text


def test_of_a_step_that_is_too_large_as_many_traces_as_may_wait_are_written(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = Kept()
    traces = traced(store, TraceSettings(max_pending_bytes=4000))
    tasks = [replace(ROW, id=f"train/data/{n}") for n in range(6)]
    groups = [play(traces, tool_agent(), task, ["2"]) for task in tasks]
    traces.end_step(0, groups)
    traces.close()
    assert 0 < sum(trace.num_bytes for trace in store.traces) <= 4000
    num_lost = 6 - len(store.traces)
    assert 0 < num_lost < 6 and f"{num_lost} episode" in caplog.text
    assert "0 MB waited" in caplog.text and "slower" not in caplog.text


def test_a_store_that_hangs_does_not_hold_the_end_of_a_run(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turnwise.tracking.traces.CLOSE_S", 0.05)
    may_end = threading.Event()

    class Hangs(Kept):
        def write(self, traces: Sequence[Trace]) -> list[str]:
            may_end.wait(60)
            return []

    traces = traced(Hangs())
    for step in range(2):
        traces.end_step(step, [play(traces, tool_agent(), ROW, ["2"])])
    traces.close()
    may_end.set()
    assert "2 episodes of 2" in caplog.text and "0.05 s" in caplog.text


def test_a_store_that_fails_or_never_opens_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    def refuse() -> Kept:
        raise ConnectionRefusedError("nobody at 127.0.0.1:9")

    traces = Traces(refuse, TraceSettings(), TAGS)
    for step in range(3):
        traces.end_step(step, [play(traces, tool_agent(), ROW, ["2"])])
    traces.close()
    assert caplog.text.count("127.0.0.1:9") == 1 and "3 episodes of 3" in caplog.text


def test_what_a_store_leaves_out_is_counted_and_said_with_its_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Choosy(Kept):
        def write(self, traces: Sequence[Trace]) -> list[str]:
            super().write(traces[:1])
            return [f"no room for {trace.tags['task']}" for trace in traces[1:]]

    store = Choosy()
    traces = traced(store)
    groups = [play(traces, tool_agent(), ROW, ["2"], sibling) for sibling in range(3)]
    traces.end_step(0, groups[:1])
    traces.close()
    assert len(store.traces) == 1
    assert caplog.text.count(f"no room for {ROW.id}") == 1 and "2 episodes of 3" in caplog.text


@pytest.mark.parametrize("has_text", [False, True])
def test_a_file_is_read_as_it_was_written(tmp_path: Path, has_text: bool) -> None:
    path = tmp_path / "traces.jsonl"
    decode = (lambda ids: bytes(i % 256 for i in ids).decode(errors="replace")) if has_text else None
    traces = Traces(lambda: TracesFile(path, 1_000_000, decode), TraceSettings(), TAGS)
    traces.end_step(0, [play(traces, tool_agent(), ROW, [CALL, "2"])])
    traces.close()
    lost: list[str] = []
    [trace] = read_traces(path, lost)
    assert not lost and kinds(trace) == ["episode", "generate", "tool", "generate"]
    assert trace.written(None) == json.loads(path.read_text())
    first = trace.spans[1].attributes
    assert first["turnwise.response_ids"] and first["turnwise.weight_versions"][0][0] == 3
    assert ("turnwise.response_text" in first) == has_text
    for span in mlflow_spans(trace.written(None)):
        assert all(json.loads(value) is not Ellipsis for value in span["attributes"].values())

    with path.open("a") as file:
        file.write('{"trace": "cut')
    assert len(list(read_traces(path, lost))) == 1 and len(lost) == 1
    with pytest.raises(DataError, match=r"trace\.backend"):
        list(read_traces(tmp_path / "none.jsonl", []))


def test_half_a_surrogate_pair_spoils_no_line(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    file = TracesFile(path, 1000, None)
    assert not file.write([Trace("0" * 32, {"task": "é\ud800"}, [Span("s", "episode", 0, 1, None)])])
    file.close()
    [trace] = read_traces(path, [])
    assert trace.tags == {"task": "é?"}


def test_a_trace_that_is_larger_than_its_file_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "traces.jsonl"
    traces = Traces(lambda: TracesFile(path, 1000, None), TraceSettings(), TAGS)
    traces.end_step(0, [play(traces, tool_agent(), ROW, [CALL, "2"])])
    traces.close()
    assert not path.read_text() and "trace.max_mb" in caplog.text and "1 episode of 1" in caplog.text


def test_a_cancelled_episode_is_traced_as_such() -> None:
    class Hangs:
        async def run(self, *_: Any) -> list[Trajectory]:
            await asyncio.sleep(3600)
            return []

    store = Kept()
    traces = traced(store)

    async def cancelled() -> None:
        loop = traced_agents(lambda _: Hangs(), traces)(ROW)
        contexts = TokenContexts(TEMPLATE, ScriptedServer([]), 4096, "episode")
        episode = asyncio.create_task(loop.run(ROW, 0, contexts, SamplingParams(max_new_tokens=4)))
        await asyncio.sleep(0)
        episode.cancel()
        await asyncio.gather(episode, return_exceptions=True)

    asyncio.run(cancelled())
    traces.close()
    [trace] = store.traces
    assert trace.tags["status"] == "cancelled" and trace.spans[0].error.startswith("CancelledError")


def test_the_command_lists_episodes_and_shows_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "traces.jsonl"
    traces = Traces(lambda: TracesFile(path, 1_000_000, None), TraceSettings(), TAGS)
    rows = play(traces, tool_agent(), ROW, [CALL, "2"])
    games = play(traces, env_agent(), SEEDED, ["<answer>a</answer>"] * 2, sibling=3)
    traces.end_step(2, [rows, games])
    traces.close()
    assert main(["trace", str(tmp_path)]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == 2 and ROW.id in listed[0] and SEEDED.id in listed[1]
    assert main(["trace", str(path), "--task", ROW.id]) == 0
    shown = capsys.readouterr().out
    assert "execute_tool note" in shown and "turn 2" in shown and SEEDED.id not in shown
    assert main(["trace", str(path), "--sibling", "3"]) == 0
    assert "reward" in capsys.readouterr().out
    assert main(["trace", str(path), "--step", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0])["tags"]["step"] == 2
    assert main(["trace", str(path), "--step", "9"]) == 2 and str(path) in capsys.readouterr().err
