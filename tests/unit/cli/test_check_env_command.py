"""`turnwise check-env` as a user meets it: a verdict in one screen, an exit status, and sentences for bad
input."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import forked
import odd_envs
import pytest
import yaml
from messages import mentions, says

from turnwise.cli.main import main

TOYS = "toy_envs"
NUM_LINES = 40
"""Lines of a terminal."""


@pytest.fixture
def lake(folder):
    """A config that names no model, with two tags."""
    env = {
        "env_type": "frozen_lake",
        "max_steps": 3,
        "env_config": {"is_slippery": False, "observation": "coordinates"},
    }
    values = {
        "sequence_length": 512,
        "custom_envs": {"Lake": env, "Large": env | {"env_config": {"size": 6}}},
    }
    (folder / "lake.yaml").write_text(yaml.safe_dump(values))
    return "lake.yaml"


@pytest.fixture
def examined(folder, capsys):
    """Runs the command; returns status and output, which fits on a screen."""

    def run(*arguments):
        status = main(["check-env", *arguments, "--episodes", "4"])
        said = capsys.readouterr().out
        assert len(said.splitlines()) <= NUM_LINES, said
        return status, said

    return run


def test_a_built_in_environment_is_fit_to_train_in(examined):
    status, said = examined("frozen_lake", "size=5", "is_slippery=false")
    first, *rows, last = said.splitlines()
    assert status == 0 and mentions(last, "FrozenLakeEnv", "fit")
    assert first.split() == ["FrozenLakeEnv", "size=5", "is_slippery=False", "4", "seeds"]
    assert re.search(says("scripted play", "1.00 (4 of 4)"), said)
    # How long a step takes is the machine's business.
    checks = [row for row in rows if not row.startswith(("step time", " "))]
    assert len(checks) == 15 and all(re.match(r"[a-z_/ ]+ ok ", row) for row in checks), said


def test_a_constructor_that_raises_is_a_finding_too(examined, folder):
    (folder / "mine_fails.py").write_text(
        "class Mine:\n    def __init__(self):\n        raise OSError('no display')\n"
    )
    status, said = examined("mine_fails:Mine")
    assert status == 1 and mentions(said, "constructor", "OSError: no display")


@pytest.mark.parametrize(
    ("source", "message", "status"),
    [
        ("import time\nwhile True:\n    time.sleep(1)\n", "importing stuck:Mine hangs: no answer in 2 s", 2),
        (
            "from odd_envs import StuckEnv\nclass Mine(StuckEnv):\n    pass\n",
            "hangs in step: no answer within 2 s",
            1,
        ),
    ],
    ids=["import", "step"],
)
def test_a_hang_is_named_and_the_process_ends(folder, source, message, status):
    (folder / "stuck.py").write_text(source)
    command = ["check-env", "stuck:Mine", "--timeout", "2"]
    if status == 1:
        command.append("how=thread")
    path = {"PYTHONPATH": str(Path(odd_envs.__file__).parent)}
    done = forked.run(command, cwd=folder, timeout=120, env=os.environ | path)
    assert done.returncode == status, done.stderr
    assert message in done.stdout + done.stderr


def test_json_says_the_same(folder, capsys):
    assert main(["check-env", "odd_envs:NaNEnv", "--json", "--episodes", "4"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["env"], report["verdict"], report["env_config"]) == ("NaNEnv", "error", {})
    [step] = [finding for finding in report["findings"] if finding["check"] == "step"]
    assert "the reward is nan" in step["result"]


def test_what_an_environment_prints_stays_out_of_the_report(folder, capsys):
    source = f"from {TOYS} import BanditEnv\n\n\nclass Loud(BanditEnv):\n    def __init__(self, since):\n"
    (folder / "loud.py").write_text(f"{source}        super().__init__()\n        print('made', since)\n")
    main(["check-env", "loud:Loud", "since=2020-01-02", "--json", "--episodes", "2"])
    said = capsys.readouterr()
    assert json.loads(said.out)["env_config"] == {"since": "2020-01-02"}
    assert "made 2020-01-02" in said.err


def test_a_class_that_raises_is_a_finding_with_its_place_which_fits_on_a_screen(examined, folder):
    source = f"from {TOYS} import LettersEnv\n\n\nclass Mine(LettersEnv):\n    def step(self, action):\n"
    (folder / "mine_long.py").write_text(
        f"{source}        raise ValueError('word ' * 9000 + '\\nnext line')\n"
    )
    status, said = examined("mine_long:Mine", "num_turns=3")
    assert status == 1 and "…" in said and "Traceback" not in said
    assert re.search(says("step", "ERROR", "ValueError: word"), said)
    assert mentions(said.splitlines()[-1], "not fit", "1 error")
    assert mentions(said, "mine_long.py:6", "step")
    assert said.count("word ") < 80, "what was raised is told once, and cut"


def test_a_long_name_of_a_check_keeps_its_column(examined, folder):
    (folder / "mine_bare.py").write_text(
        "class Mine:\n    def reset(self, *, seed=None):\n        return 'a', {}\n"
    )
    _, said = examined("mine_bare:Mine")
    assert re.search(r"^metric_reductions +ERROR", said, re.M) and said.startswith("Mine  ")


def test_limits_are_those_of_training_without_a_config(examined, tiny_model):
    _, said = examined("frozen_lake", "--tokenizer", str(tiny_model))
    assert re.search(r"an episode at most \d+ of \d+", said)


def test_a_config_gives_arguments_and_limits(examined, lake, tiny_model, monkeypatch):
    status, said = examined(lake, "--tag", "Lake", "--tokenizer", str(tiny_model))
    assert status == 0
    assert "by max_steps 3" in said and "observation=coordinates" in said
    assert re.search(r"an episode at most \d+ of 512", said)
    status, said = examined("frozen_lake", "size=5", "--config", lake, "--tag", "Large", "--max-steps", "2")
    assert "size=5" in said and "by max_steps 2" in said
    assert "tokens" not in said, "the config names no model whose tokenizer could count"
    monkeypatch.setenv("HOME", str(tiny_model.parent))
    Path("home.yaml").write_text(f"{Path(lake).read_text()}pretrain: ~/{tiny_model.name}\n")
    assert "an episode at most" in examined("home.yaml", "--tag", "Lake")[1]


def test_a_tag_and_an_argument_may_hold_what_overrides_do_not(examined, folder):
    env = {"env_type": "frozen_lake", "max_actions_per_traj": 5, "env_config": {"is_slippery": False}}
    (folder / "odd.yaml").write_text(
        yaml.safe_dump({"sequence_length": 512, "custom_envs": {"my.lake, 4x4": env}})
    )
    status, said = examined(
        "frozen_lake", "env_instruction=go left, then right", "--config", "odd.yaml", "--max-steps", "2"
    )
    assert (
        status == 0 and "by max_steps 2" in said and mentions(said, "env_instruction", "go left, then right")
    )


def test_actions_are_named_on_the_command_line(examined):
    _, without = examined(f"{TOYS}:LettersEnv")
    assert "nobody says which actions there are" in without and "--actions" in without
    _, said = examined(f"{TOYS}:LettersEnv", "--actions", "ab,CD")
    assert re.search(r"random play +ok +success", said)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "which environment?"),
        (["frozen_lak"], "Did you mean 'frozen_lake'?"),
        (["frozen_lake", "siz=5"], "Did you mean 'size'?"),
        (["frozen_lake", "observation=smell"], "smell"),
        (["frozen_lake", "size"], "KEY=VALUE"),
        (["frozen_lake", "size=[5"], ":1 can't be read: "),
        (["frozen_lake", "--tag", "Lake"], "--config FILE"),
        (["frozen_lake", "--tokenizer", "nowhere"], "nowhere"),
        (["nowhere:Env"], "no module 'nowhere'"),
        (["none.yaml"], "there is no config file none.yaml"),
        (["lake.yaml"], "has 2 environments; choose with --tag, of Lake, Large"),
        (["lake.yaml", "--tag", "Lak"], "Did you mean 'Lake'?"),
        (["lake.yaml", "--config", "lake.yaml"], "two configs"),
        ([f"{TOYS}:BanditEnv", "--config", "lake.yaml", "--tag", "Lake"], "is a frozen_lake, not a"),
        (["lake.yaml", "--tag", "Lake", "custom_envs.Lake.max_step=3"], "Did you mean 'max_steps'?"),
    ],
)
def test_bad_input_is_a_sentence(lake, capsys, arguments, message):
    assert main(["check-env", *arguments]) == 2
    said = capsys.readouterr()
    assert message in said.err and said.err.count("error: ") == 1 and "Traceback" not in said.err
    assert said.out == ""


def test_an_unknown_action_that_pays_better_than_most_is_a_finding(examined):
    status, said = examined("gymnasium", "id=Taxi-v4")
    assert status == 0
    row = re.search(r"no action +warning +(.*?)rewards", " ".join(said.split()))
    assert row and "pays better than" in row.group(1) and "format_penalty" in row.group(1)
    _, said = examined("gymnasium", "id=Taxi-v4", "format_penalty=-11")
    assert re.search(r"no action +ok", said)


def test_what_ends_an_episode_is_compared_with_episodes(examined, folder):
    source = """
from turnwise.envs.base import TextEnv


class Leaver(TextEnv):
    metric_reductions = {"success": "last"}
    actions = ("on", "back")

    def reset(self, *, seed=None):
        self.left = 4
        return f"Road {seed}.", {}

    def step(self, action):
        self.left -= 1
        metrics = {"metrics": {"success": 0.0}}
        if action not in self.actions:
            return "You left.", -0.5, True, False, metrics
        return "Go.", -0.25, self.left == 0, False, metrics
"""
    (folder / "leaver.py").write_text(source)
    _, said = examined("leaver:Leaver")
    assert "pays better than 100% of episodes" in " ".join(said.split())


def test_what_nobody_played_is_not_called_fit(examined, folder):
    source = """
from turnwise.envs.base import TextEnv


class Shop(TextEnv):
    metric_reductions = {"success": "last"}

    def reset(self, *, seed=None):
        return f"Customer {seed} wants tea.", {}

    def step(self, action):
        hit = action == '{"buy": "tea", "count": 1}'
        return "Sold.", float(hit), hit, False, {"metrics": {"success": float(hit)}}
"""
    (folder / "shop.py").write_text(source)
    status, said = examined("shop:Shop")
    assert status == 0 and "not examined" in said.splitlines()[-1] and "is fit" not in said
    for check in ("rewards", "metrics", "episodes", "observations"):
        assert re.search(rf"{check} +– .*examined", said), check
    (folder / "actions.txt").write_text('{"buy": "tea", "count": 1}\n{"buy": "milk", "count": 2}\n')
    status, said = examined("shop:Shop", "--actions-file", str(folder / "actions.txt"))
    assert (
        status == 0 and "is fit to train in" in said.splitlines()[-1] and re.search(r"random play +ok", said)
    )


def test_few_tasks_are_told_as_training_tells_them(examined):
    for arguments, advice in (
        (["id=CliffWalking-v1"], "tasks are the same"),
        (["id=CliffWalking-v1", "split=null"], "remove `split`"),
    ):
        status, said = examined("gymnasium", *arguments)
        assert status == 0 and advice in " ".join(said.split())
