"""`turnwise demos`: demonstrations of any environment, and what it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from chat_messages import user
from chat_server import ChatServer, answer
from messages import mentions, says

from turnwise.cli.main import main
from turnwise.data.demonstrations import read_demonstrations, read_rows

OWN = """
from turnwise.envs.base import TextEnv
class Door(TextEnv):
    metric_reductions = {"success": "last"}
    def reset(self, *, seed=None):
        return "A door.", {}
    def step(self, action):
        hit = action == '{"do": "open", "how": "gently"}'
        return "It is shut.", float(hit), hit, False, {"metrics": {"success": float(hit)}}
class Opener:
    def __init__(self, env, seed):
        self.env = env
    def act(self):
        return '{"do": "open", "how": "gently"}'
class Tired(Opener):
    def act(self):
        return None
class Statue:
    def __init__(self, env, seed):
        pass
class Broken(Door):
    def step(self, action):
        raise ValueError("the handle came off")
def broken_reward(completions):
    raise ValueError("no such sum")
"""


@pytest.fixture(autouse=True)
def own_classes(folder: Path) -> None:
    (folder / "own_doors.py").write_text(OWN, encoding="utf-8")


def demos(*arguments: str) -> int:
    return main(["demos", *arguments])


def lake(*arguments: str) -> int:
    return demos("frozen_lake", "is_slippery=false", "--max-steps", "10", *arguments)


def success(capsys: pytest.CaptureFixture[str]) -> float:
    """The success in the table's only row."""
    row = next(line for line in capsys.readouterr().out.splitlines() if "[" in line)
    return float(row.partition("[")[0].split()[-1])


def test_an_expert_an_erring_and_a_random_player_succeed_in_this_order(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = []
    for policy in ("expert", "erring", "random"):
        assert lake("--policy", policy, "--episodes", "60", "--out", f"{policy}.jsonl") == 0
        found.append(success(capsys))
        assert len(read_demonstrations([f"{policy}.jsonl"])) == 60
    assert found[0] == 1.0 > found[1] > found[2]


def test_the_error_rate_is_what_the_player_errs_by(capsys: pytest.CaptureFixture[str]) -> None:
    for rate, expected in (("0", "expert"), ("1", "random")):
        assert (
            lake("--policy", "erring", "--error-rate", rate, "--episodes", "40", "--out", f"{rate}.jsonl")
            == 0
        )
        erring = success(capsys)
        assert lake("--policy", expected, "--episodes", "40", "--out", f"{rate}-{expected}.jsonl") == 0
        assert abs(erring - success(capsys)) < 0.2


def test_the_same_command_writes_the_same_file() -> None:
    for name in ("a", "b"):
        assert lake("--policy", "erring", "--episodes", "5", "--out", f"{name}.jsonl") == 0
    assert Path("a.jsonl").read_bytes() == Path("b.jsonl").read_bytes()


def test_actions_with_commas_come_from_a_file_and_players_from_a_class(
    capsys: pytest.CaptureFixture[str],
) -> None:
    actions = ['{"do": "open", "how": "gently"}', '{"do": "knock", "how": "twice"}']
    Path("actions.txt").write_text("\n".join(actions), encoding="utf-8")
    assert (
        demos("own_doors:Door", "--policy", "random", "--actions-file", "actions.txt", "--episodes", "30")
        == 0
    )
    said = {
        m["content"] for row in read_demonstrations(["demos.jsonl"]) for m in row if m["role"] == "assistant"
    }
    assert said == {f"<answer>{action}</answer>" for action in actions}
    capsys.readouterr()
    assert (
        demos("own_doors:Door", "--policy", "own_doors:Opener", "--episodes", "3", "--out", "own.jsonl") == 0
    )
    assert success(capsys) == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["own_doors:Door"], "has no expert_action()"),
        (["own_doors:Door", "--policy", "random"], "--actions"),
        (["own_doors:Door", "--policy", "erring"], "has no expert_action()"),
        (["frozen_lake", "--policy", "master"], says("'master'", "expert, random, erring")),
        (["frozen_lake", "--policy", "own_doors:Nobody"], "no class 'Nobody'"),
        (["frozen_lake", "--policy", "own_doors:Statue"], "has no act()"),
        (["own_doors:Door", "--policy", "own_doors:Tired"], "gave up at once"),
        (["own_doors:Broken", "--policy", "own_doors:Opener"], "the handle came off"),
        (["frozen_lake", "--out", "own_doors.py"], "already exists"),
        (["frozen_lake", "--error-rate", "0.5"], "has no effect"),
        (["frozen_lake", "--policy", "erring", "--error-rate", "1.5"], "from 0 to 1"),
        (["frozen_lake", "--policy", "openai:http://127.0.0.1:9/v1"], "--model-name"),
        (["frozen_lake", "--policy", "openai:http://127.0.0.1:9/v1", "--model-name", "m"], "127.0.0.1:9"),
        (
            ["frozen_lake", "--policy", "random", "--actions", "a", "--actions-file", "f"],
            says("give", "one of them"),
        ),
        (["frozen_lake", "--policy", "random", "--actions-file", "nowhere.txt"], "can't be read"),
    ],
)
def test_what_cannot_be_played_is_one_sentence_and_leaves_no_file(
    arguments: list[str], message: str, refused: Callable[..., str]
) -> None:
    assert re.search(message, refused("demos", *arguments))
    assert not Path("demos.jsonl").exists()


def test_a_model_behind_a_url_demonstrates(capsys: pytest.CaptureFixture[str]) -> None:
    """The model always opens the door."""
    with ChatServer(answer('<answer>{"do": "open", "how": "gently"}</answer>')) as server:
        url = f"openai:{server.base_url}"
        assert demos("own_doors:Door", "--policy", url, "--model-name", "m", "--episodes", "20") == 0
    assert success(capsys) == 1.0 and len(read_demonstrations(["demos.jsonl"])) == 20


@pytest.fixture
def sums(calculations: Callable[..., str]) -> str:
    return calculations({"2 + 3": "single_turn_agent", "12 * 7": "tool_agent"}, pretrain="nowhere")


def test_a_model_behind_a_url_demonstrates_rows_with_their_tools(
    sums: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model is right about the product alone."""
    with ChatServer(answer("84")) as server:
        assert demos(sums, "--policy", f"openai:{server.base_url}", "--model-name", "m") == 0
    assert success(capsys) == 0.5
    plain, with_tools = read_rows(["demos.jsonl"])
    assert [message["content"] for message in plain.messages] == ["2 + 3", "84"] and not plain.tools
    assert [tool["function"]["name"] for tool in with_tools.tools] == ["calculator"]


def test_a_prompt_may_show_a_call_without_content(sums: str, capsys: pytest.CaptureFixture[str]) -> None:
    function = {"name": "calculator", "arguments": {"expression": "1 + 1"}}
    call = {"id": "call00001", "type": "function", "function": function}
    result = {"role": "tool", "name": "calculator", "tool_call_id": "call00001", "content": "2"}
    prompt = [user("1 + 1"), {"role": "assistant", "tool_calls": [call]}, result, user("12 * 7")]
    row = {"prompt": prompt, "answer": "84", "agent_name": "tool_agent"}
    Path("rows.jsonl").write_text(json.dumps(row) + "\n")
    with ChatServer(answer("84")) as server:
        assert demos(sums, "--policy", f"openai:{server.base_url}", "--model-name", "m") == 0
    [written] = read_rows(["demos.jsonl"])
    assert success(capsys) == 1.0 and len(written.messages) == 5


def test_half_a_character_of_a_model_is_written_as_a_question_mark(sums: str) -> None:
    function = {"name": "calculator", "arguments": '{"expression": "12 \\ud800 7"}'}
    call = {"content": "12 \ud800 7", "tool_calls": [{"id": "a", "type": "function", "function": function}]}

    def said(request: dict[str, object]) -> dict[str, object] | str:
        calls = "tools" in request and request["messages"][-1]["role"] == "user"
        return {"choices": [{"message": call, "finish_reason": "stop"}]} if calls else "8\udfff4"

    with ChatServer(said) as server:
        assert demos(sums, "--policy", f"openai:{server.base_url}", "--model-name", "m") == 0
    plain, with_tools = read_rows(["demos.jsonl"])
    assert plain.messages[-1]["content"] == with_tools.messages[-1]["content"] == "8?4"
    assert with_tools.messages[1]["content"] == "12 ? 7"
    assert with_tools.messages[1]["tool_calls"][0]["function"]["arguments"] == {"expression": "12 ? 7"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            [],
            says("--policy expert", "data.train_files"),
        ),
        (["--policy", "openai:http://127.0.0.1:9/v1", "--model-name", "m"], "127.0.0.1:9"),
        (
            ["--policy", "openai:http://127.0.0.1:9/v1", "--model-name", "m", "--max-steps", "3"],
            "agent.max_assistant_turns",
        ),
    ],
)
def test_rows_need_a_model_that_answers(
    sums: str, arguments: list[str], message: str, refused: Callable[..., str]
) -> None:
    assert re.search(message, refused("demos", sums, *arguments)) and not Path("demos.jsonl").exists()


def test_a_reward_that_breaks_ends_the_demonstrations_with_a_sentence(
    sums: str, refused: Callable[..., str]
) -> None:
    with ChatServer(answer("84")) as server:
        broken = [
            sums,
            "data.reward=own_doors:broken_reward",
            "--policy",
            f"openai:{server.base_url}",
            "--model-name",
            "m",
        ]
        assert mentions(refused("demos", *broken), "data.reward broken_reward", "ValueError", "no such sum")
