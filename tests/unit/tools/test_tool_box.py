"""Calls of tools: what the model reads, what fails the episode, and that every state is released."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from messages import says
from toy_tools import TASK, Notebook, blocking, called, divide, greet, leaving, schema

from turnwise.errors import ConfigError, EnvironmentFault
from turnwise.tools.calculator import calculator
from turnwise.tools.function_tool import FunctionTool
from turnwise.tools.gsm8k import Gsm8kTool
from turnwise.tools.tool_box import OfferedTool, ToolBox, ToolFault, ToolResult
from turnwise.types import Task


def task_of(**extra_info: Any) -> Task:
    return replace(TASK, payload={"extra_info": extra_info})


def box_of(*tools: Any, timeout_s: float = 60.0) -> ToolBox:
    return ToolBox(
        [OfferedTool(tool if hasattr(tool, "schema") else FunctionTool(tool)) for tool in tools], timeout_s
    )


@pytest.mark.parametrize(
    ("tool", "arguments", "text"),
    [
        (divide, {"a": 3, "b": 2}, "1.5"),
        (greet, {"name": "Ann"}, '{"said": ["Hello Ann"]}'),
        (calculator, {"expression": "123 * (4 + 5)"}, "1107"),
        (Notebook(), {"text": "half"}, "a?"),
    ],
)
def test_a_result_is_a_text(tool: Any, arguments: dict[str, Any], text: str) -> None:
    box = box_of(tool)
    assert called(box, *box.names, **arguments)[0] == ToolResult(text)


@pytest.mark.parametrize(
    ("tool", "arguments", "said"),
    [
        (divide, {"a": 1, "b": 0}, "Error executing 'divide': division by zero"),
        (divide, {"a": 1}, "Invalid arguments for 'divide': 'b' is a required property"),
        (divide, {"a": 1, "b": "2"}, "Invalid arguments for 'divide': '2' is not of type 'number'"),
        (
            divide,
            {"a": 1, "b": 2, "c": 3},
            "Invalid arguments for 'divide': Additional properties are not allowed",
        ),
        (calculator, {"expression": "__import__('os')"}, "Error executing 'calculator'"),
        (calculator, {"expression": "9 ** 9 ** 9"}, "the power is too large"),
        (calculator, {"expression": "(" * 900}, "isn't an arithmetic expression"),
        (Notebook(), {"text": "mistake"}, "Error executing 'note': no such page"),
    ],
)
def test_a_mistake_of_the_model_becomes_an_error_that_it_reads(
    tool: Any, arguments: dict[str, Any], said: str
) -> None:
    box = box_of(tool)
    result, session = called(box, *box.names, **arguments)
    assert result.is_error and said in result.text
    [name] = box.names
    assert session.metrics[f"tool/{name}/errors"] == session.metrics[f"tool/{name}/calls"] == 1


def test_an_unknown_tool_is_answered_with_the_known_ones_counted_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    result, session = called(box_of(divide, Notebook()), "nothing")
    assert result == ToolResult("Unknown function 'nothing'. Available tools: divide, note", is_error=True)
    assert session.metrics["unknown_tools"] == 1 and sum(session.metrics.values()) == 1
    assert f"Failed to decode tool call: {result.text}" in caplog.text


@pytest.mark.parametrize(("b", "is_said"), [("2", True), (0, False), (2, False)])
def test_the_log_says_which_arguments_the_schema_refused(
    b: Any, is_said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """What the tool itself refuses, such as a division by zero, was decoded."""
    caplog.set_level("INFO")
    called(box_of(divide), "divide", a=1, b=b)
    said = "Failed to decode tool call: Invalid arguments for 'divide': '2' is not of type 'number'"
    assert (said in caplog.text, "Failed to decode" in caplog.text) == (is_said, is_said)


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ("hang", ToolFault, says("0.3 s", "note.execute", "agent.tool_timeout_s")),
        ("raise", RuntimeError, "the service is down"),
        ("exit", EnvironmentFault, r"note.execute called sys.exit\(3\)"),
        ("bytes", ToolFault, says("note", "bytes", "string")),
    ],
)
def test_what_is_no_fault_of_the_model_fails_the_episode_and_releases_the_state(
    text: str, kind: type, said: str
) -> None:
    tool = Notebook()
    with pytest.raises(kind, match=said):
        called(box_of(tool, timeout_s=0.3 if text == "hang" else 60.0), "note", text=text)
    assert tool.num_open == 0


def test_a_function_that_blocks_its_thread_fails_the_episode(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ToolFault, match=says("0.3 s", "blocking.execute")):
        called(box_of(blocking, timeout_s=0.3), "blocking", path=str(pipe))
    pipe.write_text("\n")  # its thread ends


@pytest.mark.parametrize("is_circular", [False, True])
def test_a_function_whose_result_is_no_json_fails_the_episode(is_circular: bool) -> None:
    def odd(is_circular: bool) -> Any:
        """Returns what isn't a text.

        Args:
            is_circular: Whether the result holds itself.
        """
        found: list[Any] = []
        found.append(found if is_circular else b"x")
        return found

    with pytest.raises(EnvironmentFault, match=says("the tool odd", "list", "JSON")):
        called(box_of(odd), "odd", is_circular=is_circular)


def test_a_function_in_a_thread_that_exits_the_interpreter_fails_the_episode() -> None:
    with pytest.raises(EnvironmentFault, match=r"leaving called sys.exit\(4\)"):
        called(box_of(leaving), "leaving", code=4)


def test_a_cancelled_episode_releases_every_state_even_if_one_release_fails() -> None:
    class Clumsy(Notebook):
        async def release(self, state: list[str]) -> None:
            await super().release(state)
            raise RuntimeError("it broke")

    tools = [Notebook(), Clumsy(tool_schema=schema("clumsy")), Notebook(tool_schema=schema("third"))]

    async def main() -> None:
        async with box_of(*tools).open(TASK) as session:
            await session.call("note", {"text": "hang"})

    async def cancelled() -> None:
        episode = asyncio.create_task(main())
        while [tool.num_open for tool in tools] != [1, 1, 1]:
            await asyncio.sleep(0.01)
        episode.cancel()
        await episode

    with pytest.raises(RuntimeError, match="it broke"):
        asyncio.run(cancelled())
    assert [tool.num_open for tool in tools] == [0, 0, 0]


def test_a_state_is_released_if_another_one_can_not_be_made() -> None:
    class Absent(Notebook):
        async def create(self, task: Task) -> list[str]:
            raise OSError("no disk")

    tool = Notebook()
    with pytest.raises(OSError, match="no disk"):
        called(box_of(tool, Absent(tool_schema=schema("absent"))), "note", text="a")
    assert tool.num_open == 0


def test_at_most_so_many_calls_of_a_tool_go_on() -> None:
    most = 0

    class Counting(Notebook):
        num_calls = 0

        async def execute(self, state: Any, arguments: Any) -> str:
            nonlocal most
            self.num_calls += 1
            most = max(most, self.num_calls)
            await asyncio.sleep(0)
            self.num_calls -= 1
            return ""

    async def main() -> None:
        box = ToolBox([OfferedTool(Counting(), max_concurrency=2)])
        async with box.open(TASK) as session:
            await asyncio.gather(*(session.call("note", {"text": ""}) for _ in range(8)))

    asyncio.run(main())
    assert most == 2


def test_rewards_of_tools_are_those_of_their_states() -> None:
    async def main() -> list[dict[str, float]]:
        found = []
        for texts in (["a", "b"], []):
            async with box_of(Notebook(), divide).open(TASK) as session:
                for text in texts:
                    await session.call("note", {"text": text})
                found.append(await session.rewards())
        return found

    assert asyncio.run(main()) == [{"note": 0.5}, {}]


@pytest.mark.parametrize("reward", [float("nan"), 10**400], ids=["nan", "huge"])
def test_a_reward_that_is_no_number_is_a_fault_of_the_tool(reward: float) -> None:
    async def main() -> None:
        async with box_of(Notebook({"reward": reward})).open(TASK) as session:
            await session.call("note", {"text": "1.0"})
            await session.rewards()

    with pytest.raises(ToolFault, match=r"note.calc_reward returned (nan|10+);"):
        asyncio.run(main())


def test_a_parameter_that_may_be_none_takes_null() -> None:
    def look(n: int | None = None, where: Literal["a", "b"] | None = None) -> str:
        """Looks.

        Args:
            n: A number.
            where: A place.
        """
        return f"{n} {where}"

    box = box_of(look)
    assert called(box, "look", n=None, where=None)[0] == ToolResult("None None")
    assert called(box, "look", n=3, where="a")[0] == ToolResult("3 a")
    assert called(box, "look", n="3")[0].is_error


@pytest.mark.parametrize(
    "composed",
    [{"$ref": "#/$defs/Note"}, *({kind: [{"$ref": "#/$defs/Note"}]} for kind in ("allOf", "anyOf", "oneOf"))],
    ids=lambda composed: next(iter(composed)),
)
def test_a_composed_schema_has_the_parameters_of_its_parts(composed: dict[str, Any]) -> None:
    parameters = {"$defs": {"Note": schema("note")["function"]["parameters"]}, **composed}
    box = box_of(
        Notebook(tool_schema={"type": "function", "function": {"name": "note", "parameters": parameters}})
    )
    assert called(box, "note", text="a")[0] == ToolResult("a")
    for arguments, said in (
        ({"text": 5}, "5 is not of type 'string'"),
        ({"text": "a", "page": 1}, "('page' was unexpected)"),
    ):
        result, _ = called(box, "note", **arguments)
        assert result.is_error and said in result.text


def test_a_row_may_select_tools() -> None:
    session = box_of(Notebook(), divide).open(task_of(tool_selection=["note"]))
    assert [schema["function"]["name"] for schema in session.schemas] == ["note"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({}, says("function", "name")),
        (
            {"function": {"name": "a", "parameters": {"type": "objekt"}}},
            says("the tool a", "parameters", "JSON schema"),
        ),
        (
            {
                "function": {
                    "name": "a",
                    "parameters": {"properties": {"x": {"$ref": "#/$defs/Cut"}}, "$defs": {"Cat": {}}},
                }
            },
            says("the tool a", "Cut", "$defs"),
        ),
    ],
)
def test_a_schema_that_is_none_is_refused(wrong: dict[str, Any], said: str) -> None:
    tool = Notebook()
    tool.schema = wrong
    with pytest.raises(ConfigError, match=said):
        OfferedTool(tool)


def broken(x: int) -> int:
    """Fails whatever the model asks for.

    Args:
        x: 0 works.
    """
    if x:
        raise ValueError("the service has moved")
    return x


def test_a_tool_whose_first_ten_calls_raise_is_told(caplog: pytest.LogCaptureFixture) -> None:
    box = box_of(FunctionTool(broken))
    for _ in range(9):
        called(box, "broken", x=1)
    assert "broken" not in caplog.text
    called(box, "broken", x=1)
    assert all(word in caplog.text for word in ("broken", "10 calls", "ValueError", "moved"))
    caplog.clear()
    called(box, "broken", x=1)
    assert not caplog.text
    box = box_of(FunctionTool(broken))
    for x in (1, 0, *[1] * 12):
        called(box, "broken", x=x)
    assert not caplog.text


@pytest.mark.parametrize("result", [1j, float("inf"), [float("nan")], b"a"])
def test_a_result_that_is_no_json_fails_the_episode(result: Any) -> None:
    def own() -> Any:
        return result

    with pytest.raises(EnvironmentFault, match=says("the tool own", "JSON", "return a text")):
        called(box_of(FunctionTool(own, schema("own") | {"function": {"name": "own"}})), "own")


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match=says("two tools", "note")):
        box_of(Notebook(), Notebook())


def test_a_function_without_a_description_of_its_parameters_is_refused() -> None:
    def bare(x: int) -> int:
        """Nothing about x."""
        return x

    with pytest.raises(ConfigError, match=says("bare", "`Args:`")):
        FunctionTool(bare)


def test_the_published_tool_says_whether_an_answer_is_right_and_punishes_what_improves_nothing() -> None:
    task = task_of(tools_kwargs={"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "72"}}})

    async def main() -> tuple[list[str], dict[str, float]]:
        async with box_of(Gsm8kTool({}, None)).open(task) as session:
            texts = [
                (await session.call("calc_gsm8k_reward", {"answer": answer})).text
                for answer in ("7", "#### 72", "72")
            ]
            return texts, await session.rewards()

    texts, rewards = asyncio.run(main())
    wrong, right = "Current parsed answer='7' reward=0.0", "Current parsed answer='72' reward=1.0"
    assert texts == [wrong, right, right]
    assert rewards == {"calc_gsm8k_reward": -0.1}


def test_a_limit_of_time_by_signals_is_named_and_not_the_models_mistake(caplog):
    def with_alarm(text: str) -> str:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        return text

    def catching(text: str) -> str:
        try:
            return with_alarm(text)
        except ValueError:
            return "no answer"

    box = ToolBox([OfferedTool(FunctionTool(tool, schema(tool.__name__))) for tool in (with_alarm, catching)])
    with pytest.raises(EnvironmentFault, match=says("with_alarm", "async def", "agent.tool_timeout_s")):
        called(box, "with_alarm", text="a")
    assert called(box, "catching", text="a")[0].text == "no answer"
    assert "the tool catching" in caplog.text and "SIGALRM" in caplog.text
