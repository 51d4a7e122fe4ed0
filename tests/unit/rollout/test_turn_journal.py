"""turns.jsonl: every turn as soon as it is sampled, in bounded files, and replays of what never came to its
end."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import time
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
import toy_tools
import yaml
from toy_envs import IdentityEnv
from toy_tools import TOOL_CHATML, Notebook

import turnwise
from turnwise.agents.env_agent import EnvAgent, EnvAgentSettings
from turnwise.agents.single_turn_agent import RowAgentSettings
from turnwise.agents.tool_agent import ToolAgent, ToolAgentLimits
from turnwise.assemble.rollouts import agents_of, open_rollout_context, parser_of
from turnwise.assemble.tasks import build_tasks
from turnwise.chat.contexts import TokenContexts
from turnwise.chat.template import ChatTemplate
from turnwise.chat.tool_calls import find_parser
from turnwise.cli.main import main
from turnwise.config import AgenticConfig, load_config
from turnwise.errors import DataError, RolloutError, ServerError
from turnwise.examine.examined import examine
from turnwise.rollout.journal import write_group
from turnwise.rollout.record import read_record
from turnwise.rollout.recorded import replay
from turnwise.rollout.turn_journal import TurnJournal, earlier_part, is_turn_journal, read_turns
from turnwise.testing.fakes import ScriptedServer, byte_tokenizer
from turnwise.tools.tool_box import OfferedTool, ToolBox
from turnwise.types import Group, SamplingParams, Task, Trajectory

TEMPLATE = ChatTemplate(byte_tokenizer(), TOOL_CHATML)
TASK = Task(
    id="train/data/0",
    tag="data",
    split="train",
    seed=0,
    payload={"prompt": "6 / 3?"},
    agent="tool_agent",
    row=0,
)
SAMPLING = SamplingParams(max_new_tokens=256)


def agents(task: Task) -> ToolAgent:
    tools = ToolBox([OfferedTool(Notebook())], timeout_s=60.0)
    return ToolAgent(RowAgentSettings(), tools=tools, limits=ToolAgentLimits())


def contexts(server: Any, episode_id: str) -> TokenContexts:
    return TokenContexts(TEMPLATE, server, 4096, episode_id, parser=find_parser("hermes", TEMPLATE))


def noting(text: str) -> str:
    return f'<tool_call>{{"name": "note", "arguments": {{"text": "{text}"}}}}</tool_call>'


def play(
    path: Path, responses: list[str], kind: type[Exception] | None = None, agents: Any = agents
) -> list[Trajectory]:
    """Plays an episode into a journal. An episode that asks for more responses ends with an error of this
    kind."""
    journal = TurnJournal(path, 1_000_000)
    opened = contexts(ScriptedServer(map(TEMPLATE.respond, responses), version=7), "episode")
    with closing(journal), pytest.raises(kind) if kind else nullcontext():
        return asyncio.run(journal.noted(agents)(TASK).run(TASK, 1, opened, SAMPLING))
    return []


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "turns.jsonl"


def replayed(trajectory: Trajectory, agents: Any = agents) -> str:
    return asyncio.run(replay(trajectory, agents, contexts, SAMPLING, is_whole=False))


def test_an_unfinished_episode_keeps_its_turns_and_is_replayed(path: Path) -> None:
    play(path, [noting("x"), noting("y")], ServerError)
    asked, sampled, asked_again, sampled_again, last = [
        json.loads(line) for line in path.read_text().splitlines()
    ]
    assert asked["task"]["payload"] == TASK.payload and asked["messages"] == [
        {"role": "user", "content": "6 / 3?"}
    ]
    turn = sampled["sampled"]
    assert len(turn["response_ids"]) == len(turn["logprobs"]) and turn["versions"] == [
        [7, len(turn["response_ids"])]
    ]
    [call] = sampled["tool_calls"]
    assert call["function"] == {"name": "note", "arguments": {"text": "x"}}
    assert asked_again["messages"] == [
        {"role": "tool", "name": "note", "tool_call_id": call["id"], "content": "x"}
    ]
    assert sampled_again["turn"] == 1 and last["messages"][0]["content"] == "x, y", (
        "the last result came before the error"
    )

    [trajectory], lost = read_turns(path)
    assert lost == [] and is_turn_journal(path) and not is_turn_journal(path.parent)
    assert (trajectory.task, trajectory.sibling, len(trajectory.turns)) == (TASK, 1, 2)
    assert replayed(trajectory) == ""
    trajectory.turns[1].prompt_ids = trajectory.turns[1].prompt_ids + 1
    with pytest.raises(RolloutError, match=r"train/data/0, sibling 1, turn 2, position \d+: expected"):
        replayed(trajectory)


def test_a_finished_episode_is_replayed_too_and_one_that_ends_too_early_differs(path: Path) -> None:
    play(path, [noting("x"), "2"])
    [trajectory], _ = read_turns(path)
    assert replayed(trajectory) == ""
    trajectory.turns.append(trajectory.turns[1])
    with pytest.raises(RolloutError, match=r"turn 3, the loop ended before it"):
        replayed(trajectory)


def test_an_episode_of_an_environment_is_replayed_though_its_observations_are_noted_after_the_turn(
    path: Path,
) -> None:
    agent = EnvAgent(lambda _: IdentityEnv(), EnvAgentSettings("data", turn_template="Say: {observation}"))
    play(path, ["<answer>a</answer>"] * 3, agents=lambda _: agent)
    [trajectory], _ = read_turns(path)
    assert [turn.observation[:5] for turn in trajectory.turns] == ["Say: "] * 3 and replayed(
        trajectory, lambda _: agent
    ) == ""


def test_a_replay_executes_no_call_whose_result_is_recorded(path: Path) -> None:
    """A tool that answers otherwise each time, several calls in a turn, one that can't be read, one too many,
    a long result."""

    class Counting(Notebook):
        num_calls = 0

        async def execute(self, state: Any, arguments: Any) -> str:
            Counting.num_calls += 1
            return f"{Counting.num_calls} " + "x" * (3000 if arguments["text"] == "long" else 0)

    def counting(task: Task) -> ToolAgent:
        tools = ToolBox([OfferedTool(Counting())], timeout_s=60.0)
        return ToolAgent(RowAgentSettings(), tools=tools, limits=ToolAgentLimits(max_parallel_calls=2))

    [played] = play(
        path, [noting("long") + noting("y") + noting("z") + "<tool_call>{", noting("y"), "2"], agents=counting
    )
    assert [turn.tool_results and len(turn.tool_results) for turn in played.turns] == [
        4,
        1,
        None,
    ] and Counting.num_calls == 3
    _, read = read_record(write_group(0, Group(TASK, [played]))[0])
    for trajectory, is_whole in ((read, True), (read_turns(path)[0][0], False)):
        assert [turn.tool_results for turn in trajectory.turns] == [
            turn.tool_results for turn in played.turns
        ]
        assert asyncio.run(replay(trajectory, counting, contexts, SAMPLING, is_whole=is_whole)) == ""
    assert Counting.num_calls == 3
    read.turns[
        1
    ].tool_results = None  # as in records of earlier versions: the tool is asked, and says something else
    with pytest.raises(RolloutError, match=r"turn 3, position \d+: expected"):
        asyncio.run(replay(read, counting, contexts, SAMPLING))


def test_what_goes_wrong_after_the_last_turn_is_said(path: Path) -> None:
    play(path, [noting("raise")], RuntimeError)
    [trajectory], _ = read_turns(path)
    assert (
        "sibling 1, after the last turn of the record: the agent of train/data/0 raised RuntimeError"
        in replayed(trajectory)
    )


def test_another_attempt_is_another_episode(path: Path) -> None:
    play(path, [noting("x")], ServerError)
    play(path, [noting("x"), noting("y"), "z"])
    assert [len(trajectory.turns) for trajectory in read_turns(path)[0]] == [1, 3]


@pytest.mark.parametrize("cut", [1, 30, -3])
def test_a_damaged_last_line_is_left_out_with_a_sentence_and_written_past(path: Path, cut: int) -> None:
    play(path, [noting("x"), "2"])
    whole = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*whole[:-1], whole[-1][:cut]]))
    [trajectory], [said] = read_turns(path)
    assert len(trajectory.turns) == 1 and said.startswith("turns.jsonl, line 4 is left out: invalid JSON")
    play(path, ["3"])
    assert [len(trajectory.turns) for trajectory in read_turns(path)[0]] == [1, 1]


def test_turns_whose_beginning_is_gone_are_left_out_with_a_sentence(path: Path) -> None:
    play(path, [noting("x"), noting("y"), "z"])
    lines = path.read_text().splitlines(keepends=True)
    for left in (lines[1:], lines[:1] + lines[2:]):
        path.write_text("".join(left))
        assert read_turns(path) == (
            [],
            ["turns of 1 episode are left out, since earlier ones of them are gone"],
        )
    with pytest.raises(DataError, match="there is no such file"):
        read_turns(path.with_name("nothing.jsonl"))


def test_the_bytes_are_bounded_and_the_newest_lines_are_kept(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    num_bytes = 2000
    for start in (0, 100):  # the second journal goes on in the file of the first
        journal = TurnJournal(path, num_bytes)
        for number in range(start, start + 100):
            journal.append(
                lambda number=number: {"episode": "e", "number": number, "text": "é" * (number % 30)}
            )
        journal.append(lambda: {"episode": "e", "text": "x" * num_bytes})
        journal.close()
        files = earlier_part(path), path
        assert sorted(path.parent.iterdir()) == sorted(files)
        assert sum(file.stat().st_size for file in files) <= num_bytes
        numbers = [
            json.loads(line)["number"] for file in files for line in file.read_text().splitlines() if line
        ]
        assert numbers == list(range(numbers[0], start + 100)) and len(numbers) > 10
    assert caplog.text.count("turns.jsonl has no room for 1 line; raise turn_journal_mb") == 2


def test_a_journal_that_goes_on_in_a_full_file_begins_a_new_one_that_is_known_as_a_journal(
    path: Path,
) -> None:
    play(path, [noting("x"), "2"])
    journal = TurnJournal(path, path.stat().st_size)  # half of it is the limit
    journal.append(lambda: {"episode": "e"})
    journal.close()
    assert (
        json.loads(path.read_text()) == {"episode": "e"}
        and is_turn_journal(path)
        and is_turn_journal(earlier_part(path))
    )


def test_a_disk_that_fails_turns_it_off_and_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    journal = TurnJournal(folder / "turns.jsonl", 200)
    shutil.rmtree(folder)
    for _ in range(10):
        journal.append(lambda: {"episode": "e", "text": "x" * 60})
    journal.close()
    assert caplog.text.count("turns.jsonl records nothing more: [Errno 2]") == 1


def test_a_line_that_can_not_be_made_is_shown_as_what_it_is(path: Path) -> None:
    journal = TurnJournal(path, 10_000)
    journal.append(lambda: {"episode": "a\ud800", "image": np.zeros(3)})
    journal.close()
    assert json.loads(path.read_text()) == {"episode": "a?", "image": "ndarray"}


@pytest.fixture
def job(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config whose user doesn't reply to the third answer."""
    monkeypatch.chdir(tmp_path)
    users = [{"name": "user", "class_name": "toy_users.Asker", "config": {"reply": "hang", "after": 2}}]
    Path("users.yaml").write_text(json.dumps({"interaction": users}))
    rows = [
        {"prompt": word, "extra_info": {"interaction_kwargs": {"name": "user"}}} for word in ("one", "two")
    ]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "exp_name": "job",
        "pretrain": str(tiny_model),
        "max_steps": 1,
        "rollout_batch_size": 2,
        "sequence_length": 512,
        "track_with": [],
        "turn_journal_mb": 1,
        "actor_infer": {
            "generating_args": {
                "max_new_tokens": 64,
                "stop_strings": list("abcdefghijklmnopqrstuvwxyz0123456789"),
            }
        },
        "train_env_manager": {"num_env_groups": 1, "group_size": 2},
        "data": {"train_files": "rows.jsonl", "reward": "toy_rewards:length"},
        "agent": {"interaction_config_path": "users.yaml"},
    }
    Path("job.yaml").write_text(yaml.safe_dump(values))
    return tmp_path / "job.yaml"


def test_a_run_that_is_killed_in_an_episode_leaves_its_turns(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = [Path(turnwise.__file__).parents[1], Path(toy_tools.__file__).parent]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, own))}
    run = forked.Popen(["train", str(job)], cwd=job.parent, env=environment, stdout=subprocess.DEVNULL)
    try:
        while not (
            found := [
                path
                for path in job.parent.glob("runs/job/*/turns.jsonl")
                if path.read_text().count('"turn":2')
            ]
        ):
            assert run.poll() is None, "it ended by itself"
            time.sleep(0.05)
    finally:
        run.send_signal(signal.SIGKILL)
        run.wait()
    [path] = found
    assert not (path.parent / "rollouts.jsonl").read_text(), "no trajectory was finished"
    assert max(len(trajectory.turns) for trajectory in read_turns(path)[0]) == 3
    with path.open("a") as file:
        file.write('{"episode":"train/da')
    # The user of the replay replies to everything.
    (job.parent / "users.yaml").write_text(
        json.dumps({"interaction": [{"name": "user", "class_name": "toy_users.Asker"}]})
    )
    assert main(["rollout", str(job), "--replay", str(path)]) == 0
    said = capsys.readouterr()
    assert "2 trajectories, all as recorded" in said.out
    assert "note: turns.jsonl, line" in said.err and "is left out: invalid JSON" in said.err
    assert main(["rollout", str(job), "--replay", str(path), "--split", "val"]) == 2
    assert "holds no turn of the split val (--split); turns.jsonl, line" in capsys.readouterr().err


def test_calls_of_tools_are_read_in_a_replay(
    job: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (job.parent / "tools.yaml").write_text("tools: [{class_name: toy_tools.Notebook}]")
    shutil.copytree(tiny_model, job.parent / "long")  # its weights aren't read
    shape = json.loads((tiny_model / "config.json").read_text()) | {"max_position_embeddings": 2048}
    (job.parent / "long" / "config.json").write_text(json.dumps(shape))
    changes = {
        "pretrain": "long",
        "sequence_length": 2048,
        "actor_infer.generating_args.max_new_tokens": 256,
        "agent.tool_config_path": "tools.yaml",
        "agent.tool_parser": "hermes",
        "data.default_agent": "tool_agent",
    }
    overrides = [f"{key}={value}" for key, value in changes.items()]
    config, _ = load_config(job, overrides, AgenticConfig)
    policy = open_rollout_context(examine(config))
    try:
        template, task = policy.template, build_tasks(examine(config), "train", policy.template).task(0)
        said = [noting("x"), "1", noting("y"), "2"]
        opened = TokenContexts(
            template, ScriptedServer(map(template.respond, said)), 2048, "e", parser_of(config, template)
        )
        # It ends the conversation after the second answer.
        user = {
            "interaction": [{"name": "user", "class_name": "toy_users.Asker", "config": {"num_questions": 1}}]
        }
        (job.parent / "users.yaml").write_text(json.dumps(user))
        agent = agents_of(examine(config), "train", policy)(task)
        [trajectory] = policy.event_loop.run(agent.run(task, 0, opened, SAMPLING))
    finally:
        policy.close()
    assert [turn.metrics.get("tool_calls") for turn in trajectory.turns] == [
        1,
        0,
        1,
        0,
    ] and trajectory.status == "finished"
    (job.parent / "rollouts.jsonl").write_text(
        "".join(line + "\n" for line in write_group(0, Group(task, [trajectory])))
    )
    arguments = ["rollout", str(job), "--replay", "rollouts.jsonl", *overrides]
    assert main(arguments) == 0, capsys.readouterr().err
    assert "1 trajectories, all as recorded" in capsys.readouterr().out
