"""`turnwise play` as a user meets it: a person at a pipe or a terminal, players, models, and a model behind a
URL."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import sys
from types import SimpleNamespace
from typing import get_args

import forked
import pytest
import yaml
from chat_server import ChatServer, answer
from messages import mentions, says
from sglang_fake import SGLangFake
from transformers import AutoModelForCausalLM

from turnwise.cli.main import main
from turnwise.play.gutter import ENDS
from turnwise.play.screen import PlayScreen
from turnwise.runtime.console import open_console
from turnwise.types import Limit, Task, Trajectory

TOYS = "toy_envs"


@pytest.fixture
def lake(folder, tiny_model):
    """A config that names its model."""
    env = {
        "env_type": "frozen_lake",
        "max_steps": 3,
        "max_tokens_per_step": 16,
        "agent_system_template": "Walk.",
        "agent_template": "{observation}",
        "env_config": {"is_slippery": False, "env_instruction": ""},
    }
    values = {"pretrain": str(tiny_model), "sequence_length": 256, "custom_envs": {"Lake": env}}
    (folder / "lake.yaml").write_text(yaml.safe_dump(values))
    return "lake.yaml"


@pytest.fixture
def played(folder, capsys, monkeypatch):
    """Plays with lines of a pipe; returns what was printed."""

    def run(*arguments, lines=""):
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        assert main(["play", *arguments]) == 0
        return capsys.readouterr().out

    return run


def rows(said, label):
    """The texts of the lines that carry a label in the gutter."""
    return [line.partition("│ ")[2] for line in said.splitlines() if line.startswith(f"{label} ")]


def test_a_person_at_a_pipe(played, lake):
    said = played(lake, lines="Right\n\n!what?\nq\n")
    assert [line for line in said.splitlines() if line.startswith("action")] == [
        "actions: Left, Down, Right, Up",
        "action ⟩ Right",
        "action ⟩ ",
        "action ⟩ !what?",
        "action ⟩ q",
    ]
    assert rows(said, "sees")[0] == "<|im_start|>system"
    assert rows(said, "says") == ["<answer>Right</answer><|im_end|>", "what?<|im_end|>"]
    assert rows(said, "does")[0].startswith("'Right' → reward 0, success 0, action_is_valid 1")
    assert mentions(rows(said, "does")[1], "action_pattern", "reward 0")
    assert rows(said, "left")[0].startswith("2 turns, ")
    assert rows(said, "score") == ["0 after 2 turns, left by you"]
    assert played(lake, lines="Right\n").count("left by you") == 1, "the end of input is an end"


def test_bytes_that_are_no_text_become_question_marks(played, lake):
    assert rows(played(lake, lines="!R\udcffight\n"), "says") == ["R?ight<|im_end|>"]


def test_a_closed_standard_input_is_an_end(lake, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["play", lake]) == 0
    assert rows(capsys.readouterr().out, "score") == ["0 after 0 turns, left by you"]


def test_the_figures_add_up(played, lake):
    said = played(lake, "--policy", "scripted", "--ids")
    seen = [int(count) for count in re.findall(r"^sees +\+(\d+)", said, re.M)]
    sampled = [int(count) for count in re.findall(r"^says +\+(\d+)", said, re.M)]
    total = sum(seen) + sum(sampled)
    assert rows(said, "tokens") == [
        f"{total} in 1 context, response_mask 1 on {sum(sampled)} ({sum(sampled) / total:.0%})"
    ]
    left = [int(count) for count in re.findall(r"(\d+) tokens of the context", said)]
    assert left[-1] == 256 - total
    assert re.findall(r"context (\d+) of 256", said)[0] == str(seen[0] + sampled[0])
    spans = re.findall(r"turn \d: (\d+)–(\d+)", said)
    assert [int(stop) - int(start) + 1 for start, stop in spans] == sampled and int(spans[0][0]) == seen[0]
    ids = re.search(r"^ids +│ ([\d ]+(?:\n +│ [\d ]+)*)", said, re.M).group(1)
    assert len(re.findall(r"\d+", ids)) == seen[0]
    [mask] = rows(said, "mask")
    assert set(mask) == {"█", "░"} and mask.startswith("░") and mask.endswith("█")


def test_a_model_shows_its_log_probs(played, lake, tiny_model):
    said = played(lake, "--policy", str(tiny_model), "--split", "val", "--seed", "4")
    assert said.startswith("Lake  val seed 4 · mode trajectory")
    shown = [float(p) for row in rows(said, "logp") for p in re.findall(r" \d+ (-?\d+\.\d\d)(?:   |$)", row)]
    assert shown and all(logprob <= 0 for logprob in shown)
    assert re.search(r"cut at 16 tokens|<\|im_end\|>", said)


def test_a_bare_environment_has_the_defaults_of_training_and_arguments(played):
    said = played("frozen_lake", "size=2", "is_slippery=false", "--policy", "scripted", "--max-steps", "4")
    assert mentions(said, "note", "tokenizer")
    assert "You act in an environment, one action each turn." in said
    assert rows(said, "score") == ["1 after 2 turns, finished by the environment"]


def test_a_config_that_leaves_the_model_to_the_command_line(played, folder):
    (folder / "bare.yaml").write_text(yaml.safe_dump({"custom_envs": {"Lake": {"env_type": "frozen_lake"}}}))
    said = played(
        "bare.yaml",
        "custom_envs.Lake.env_config.size=3",
        "--policy",
        "random",
        "custom_envs.Lake.max_steps=1",
    )
    assert rows(said, "score") == ["0 after 1 turn, cut by max_steps"]


def test_what_a_terminal_would_take_for_a_command_is_written_out(played, folder):
    source = f"from {TOYS} import BanditEnv\n\n\nclass Rude(BanditEnv):\n    def reset(self, *, seed=None):\n"
    (folder / "rude.py").write_text(source + "        return 'clear \\x1b[2J now', {}\n")
    assert "clear \\x1b[2J now" in played("rude:Rude", "--policy", "random")


def test_a_model_behind_sglang_shows_its_log_probs(played, lake, tiny_model):
    server = SGLangFake(AutoModelForCausalLM.from_pretrained(tiny_model)).start()
    where = "actor_infer.strategy_args"
    given = (f"{where}.strategy_name=sglang", f"{where}.strategy_config.url={server.url}")
    said = played(lake, "--policy", str(tiny_model), *given)
    server.shutdown()
    server.server_close()
    assert rows(said, "logp") and rows(said, "score")[0].startswith("0 after") and server.num_sampled


def test_a_model_behind_a_url(played, lake):
    with ChatServer(answer("I go <answer>Right</answer>")) as server:
        said = played(lake, "--policy", f"openai:{server.base_url}", "--model-name", "small")
    assert mentions(said, "token ids")
    assert rows(said, "says") == ["I go <answer>Right</answer>"] * 3
    assert not rows(said, "ids") and not rows(said, "tokens") and not rows(said, "mask")
    contents = [content for _, _, content in server.asked]
    assert [len(content["messages"]) for content in contents] == [2, 4, 6]
    assert {(content["model"], content["max_tokens"]) for content in contents} == {("small", 16)}


def test_a_person_at_a_terminal_leaves_with_control_c(lake, folder):
    terminal = Terminal(folder, lake, "--no-color")
    terminal.read_until("action")
    terminal.write(b"Right\n")
    terminal.read_until("turn 2 of 3")
    terminal.read_until("⟩ ")
    said = terminal.read_to_the_end(pressing=b"\x03")
    assert terminal.process.wait(60) == 0
    assert "after 1 turn, left by you" in said and "Traceback" not in said
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", said), "no colour"


ON_A_TERMINAL = """
import fcntl, sys, termios
from turnwise.cli.main import main

fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # the terminal of standard input sends it Ctrl-C
sys.exit(main())
"""


class Terminal:
    """`turnwise play` on a terminal of its own."""

    def __init__(self, folder, *arguments):
        (folder / "on_a_terminal.py").write_text(ON_A_TERMINAL)
        self._file, slave = pty.openpty()
        self._unread = ""
        streams = {"stdin": slave, "stdout": slave, "stderr": slave, "env": os.environ | {"TERM": "xterm"}}
        words = ["play", *arguments]
        self.process = forked.Popen(
            words, module="on_a_terminal", cwd=folder, start_new_session=True, **streams
        )
        os.close(slave)

    def write(self, keys):
        os.write(self._file, keys)

    def read_until(self, text):
        """What comes up to and with `text`; the rest is for the next call."""
        while text not in self._unread:
            ready, _, _ = select.select([self._file], [], [], 120)
            assert ready and self._read(), f"{text!r} never came: {self._unread}"
        said, _, self._unread = self._unread.partition(text)
        return said + text

    def read_to_the_end(self, pressing):
        """What comes after some keys are pressed. Python may lose a Ctrl-C that comes just when it begins to
        wait for a line; whoever sees nothing happen presses it again."""
        for _ in range(10):
            self.write(pressing)
            while select.select([self._file], [], [], 10)[0]:
                if not self._read():
                    return self._unread
        raise AssertionError(f"it never ended: {self._unread}")

    def _read(self):
        try:
            chunk = os.read(self._file, 4096).decode(errors="replace")
        except OSError:  # how Linux says that nobody writes to the terminal any more
            return False
        self._unread += chunk
        return bool(chunk)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["frozen_lake", "--policy", "nowhere"], says("human, random, scripted, openai:URL")),
        (["frozen_lake", "--policy", "~nobody-here/model"], says("human, random, scripted, openai:URL")),
        (["frozen_lake", "--policy", "openai:localhost"], "--model-name"),
        (["frozen_lake", "--policy", "openai:localhost", "--model-name", "x"], says("http://", "localhost")),
        (
            ["frozen_lake", "--policy", "openai:http://127.0.0.1:9/v1", "--model-name", "x"],
            says("server", "up"),
        ),
        (["frozen_lake", "--tokenizer", "nowhere"], "nowhere"),
        (
            ["frozen_lake", "--policy", "scripted", "--actions", "Up"],
            says("--actions", "random player"),
        ),
        (
            ["frozen_lake", "--policy", "random", "--actions", " ,"],
            says("--actions", "' ,'"),
        ),
        (
            ["frozen_lake", "--model-name", "x"],
            says("--model-name", "openai:URL", "--policy human"),
        ),
        (["frozen_lake", "--policy", ".", "--tokenizer", "."], says("model", "its own")),
        (
            ["frozen_lake", "--policy", "openai:http://a", "--model-name", "x", "--ids"],
            says("--ids", "token ids"),
        ),
        (
            ["lake.yaml", "custom_envs.Lake.env_config.render_mode=rgb_array", "--policy", "random"],
            "takes strings only",
        ),
        ([f"{TOYS}:LettersEnv", "--policy", "random"], "--actions a,b,c"),
        (["odd_envs:RaisingEnv", "--policy", "random"], "RuntimeError: the toy is broken"),
        (
            [
                "lake.yaml",
                "sequence_length=8",
                "custom_envs.Lake.max_tokens_per_step=2",
                "--policy",
                "random",
            ],
            "raise sequence_length",
        ),
    ],
)
def test_bad_input_is_a_sentence(lake, refused, monkeypatch, arguments, message):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Right\n"))
    said = refused("play", *arguments)
    assert re.search(message, said) and said.count("error: ") == 1


@pytest.fixture
def products(calculations):
    return calculations({"12 * 7": "tool_agent", "13 * 7": "tool_agent"}, eval_steps=0)


CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "13 * 7"}}</tool_call>'


def test_a_person_plays_a_row_with_its_tools(played, products):
    said = played(products, "--seed", "1", lines=f"{CALL}\n91\n")
    assert "train row 1 · tool_agent" in said and '"name": "calculator"' in said
    assert (
        "91<|im_end|>" in rows(said, "says") and "91<|im_end|>" in said.split("turn 2")[1].split("says")[0]
    ), "the result is shown"
    assert [line.partition(" → ")[0] for line in rows(said, "does")] == ["a call", "an answer"]
    assert rows(said, "score") == ["1 after 2 turns, finished"]
    assert rows(said, "rewards") == ["exact_match 1"] and "calculator/calls 1" in rows(said, "metrics")[0]


def test_a_model_plays_a_row(played, products, tiny_model, monkeypatch):
    monkeypatch.setenv("HOME", str(tiny_model.parent))
    said = played(
        products, "--policy", f"~/{tiny_model.name}", "actor_infer.generating_args.max_new_tokens=4"
    )
    assert "12 * 7" in said and rows(said, "logp") and rows(said, "score")[0].startswith("0 after 1 turn")


def test_a_model_behind_a_url_calls_tools(played, products):
    function = {"name": "calculator", "arguments": '{"expression": "12 * 7"}'}
    calls = {"content": None, "tool_calls": [{"id": "call_1", "type": "function", "function": function}]}

    def said(request):
        done = request["messages"][-1]["role"] == "tool"
        message = {"content": request["messages"][-1]["content"]} if done else calls
        return {"choices": [{"message": {"role": "assistant"} | message, "finish_reason": "stop"}]}

    with ChatServer(said) as server:
        shown = played(products, "--policy", f"openai:{server.base_url}", "--model-name", "x")
        [_, _, first], [_, _, second] = server.asked
    assert first["tools"][0]["function"]["name"] == "calculator" and "tools" in second
    assert [m["role"] for m in second["messages"]] == ["user", "assistant", "tool"]
    assert second["messages"][1]["tool_calls"][0]["function"] == {
        "name": "calculator",
        "arguments": '{"expression": "12 * 7"}',
    }
    assert rows(shown, "calls") == ['calculator({"expression": "12 * 7"})'] and rows(shown, "rewards")[
        0
    ].endswith("exact_match 1")


@pytest.mark.parametrize("arguments", ['{"expression": "2 * 7"}', {"expression": "2 * 7"}])
def test_the_examples_in_a_row_s_prompt_are_shown_for_a_model_behind_a_url(
    played, folder, products, arguments
):
    call = {"id": "call_1", "type": "function", "function": {"name": "calculator", "arguments": arguments}}
    prompt = [{"role": role, "content": role} for role in ("system", "user", "assistant", "tool", "user")]
    prompt[2] = {"role": "assistant", "content": "", "tool_calls": [call]}
    row = {"prompt": prompt, "answer": "84", "agent_name": "single_turn_agent"}
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    with ChatServer(answer("84")) as server:
        shown = played(products, "--policy", f"openai:{server.base_url}", "--model-name", "x")
    assert (
        rows(shown, "system") == ["system"]
        and rows(shown, "user") == ["user"] * 2
        and rows(shown, "tool") == ["tool"]
    )
    assert rows(shown, "calls") == ['calculator({"expression": "2 * 7"})'] and rows(shown, "says") == ["84"]


LOOPS = """
from turnwise.types import CallOptions, Trajectory

class Drafts:
    async def run(self, task, sibling, open_conversation, sampling):
        conversation = open_conversation(sampling)
        messages = [{"role": "user", "content": task.payload["prompt"]}]
        for options in (CallOptions(temperature=1.3, max_new_tokens=2), CallOptions(max_new_tokens=6)):
            await conversation.generate(messages, options)
            messages = [{"role": "user", "content": "Now write it well."}]
        return [Trajectory(task, sibling, conversation.turns)]
"""


@pytest.mark.parametrize("player", ["a person", "a model", "a URL"])
def test_a_loop_of_the_users_own_plays_a_row(played, folder, products, tiny_model, player):
    (folder / "my_loops.py").write_text(LOOPS)
    (folder / "rows.jsonl").write_text(
        json.dumps({"prompt": "12 * 7", "answer": "84", "agent_name": "my_loops:Drafts"}) + "\n"
    )
    asked = [products, "agent.tool_config_path=null"]
    if player == "a model":
        said = played(*asked, "--policy", str(tiny_model))
        # Of each token its text, its id and its log-prob.
        assert [len(line.split()) for line in rows(said, "logp")] == [3 * 2, 3 * 6]
    elif player == "a URL":
        with ChatServer(lambda request: answer("84")) as server:
            said = played(*asked, "--policy", f"openai:{server.base_url}", "--model-name", "x")
            asked_of_it = [request for _, _, request in server.asked]
        assert [request["max_tokens"] for request in asked_of_it] == [2, 6] and asked_of_it[0][
            "temperature"
        ] == 1.3
        assert asked_of_it[1]["messages"][-1]["content"] == "Now write it well."
    else:
        said = played(*asked, lines="8\n84\n")
    assert "train row 0 · my_loops:Drafts" in said and said.count("Now write it well.") == 1
    assert rows(said, "score") == [f"{0 if player == 'a model' else 1} after 2 turns, finished"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seed", "2"], says("row 2", "--seed", "0 to 1")),
        (["--policy", "random"], says("rows", "data.train_files")),
        (["--max-steps", "3"], "agent.max_assistant_turns"),
        (["--tag", "Lake"], says("environment", "'Lake'")),
        (["--split", "val"], "data.val_files"),
    ],
)
def test_what_no_row_can_be_played_with(products, refused, arguments, message):
    assert re.search(message, refused("play", products, *arguments))


def test_rows_beside_environments_are_the_tag_data(played, folder, products):
    values = yaml.safe_load((folder / products).read_text())
    values["data"]["reward"] = "format"
    values["custom_envs"] = {"Toy": {"env_type": f"{TOYS}:LettersEnv"}}
    (folder / products).write_text(yaml.safe_dump(values))
    assert "train row 0 · tool_agent" in played(products, "--tag", "data", lines="84\n")
    assert "train seed 0" in played(products, lines="q\n")


def test_a_simulated_user_replies_to_a_person(played, folder, products):
    (folder / "users.yaml").write_text("interaction: [{name: gsm8k, class_name: gsm8k, config: {}}]")
    row = {
        "prompt": "12 * 7",
        "answer": "84",
        "extra_info": {"interaction_kwargs": {"name": "gsm8k", "ground_truth": "84"}},
    }
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    users = [
        "agent.interaction_config_path=users.yaml",
        "agent.max_user_turns=3",
        "agent.tool_config_path=null",
    ]
    said = played(products, *users, lines="#### 83\n#### 84\n")
    first, second = (line.partition("reward ")[2] for line in rows(said, "does"))
    assert float(first.split(",")[0]) < float(second.split(",")[0]), "the user scores each answer"
    assert rows(said, "score")[0].endswith("after 2 turns, finished")


def test_play_has_a_sentence_for_every_limit() -> None:
    assert set(ENDS) == set(get_args(Limit))


def test_an_episode_whose_reward_failed_has_no_score(capsys):
    """The zeros of an episode that was scored aren't listed one by one either."""
    task = Task("train/data/1", "data", "train", seed=1, row=0)
    failed = Trajectory(task, 0, status="failed", error="data.reward f raised KeyError: 'a'")
    scored = Trajectory(task, 0, metrics={"success": 1.0} | {f"metric_{number}": 0.0 for number in range(21)})
    screen = PlayScreen(open_console(), SimpleNamespace(task=task, policy=SimpleNamespace(tokenizer=None)))
    screen.ended([failed], None)
    said = capsys.readouterr().out
    assert "raised KeyError" in said and "finished" not in said
    screen.ended([scored], None)
    said = capsys.readouterr().out
    assert "success 1" in said and "metric_3" not in said and "21 others 0" in said
