"""Numbers, texts and streams that a shell can give to any verb."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import forked
import pytest
from messages import mentions, says

from turnwise.cli.main import main

LAKE = "pretrain: model\ncustom_envs:\n  Lake: {env_type: frozen_lake}\n"


def turnwise(*arguments, **options):
    return forked.run(arguments, capture_output=False, stderr=subprocess.PIPE, timeout=120, **options)


@pytest.fixture
def lake(tmp_path):
    (tmp_path / "lake.yaml").write_text(LAKE)
    return str(tmp_path / "lake.yaml")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("check-env", "frozen_lake", "--timeout", "nan"), says("--timeout", "nan", "more than 0")),
        (
            ("check-env", "frozen_lake", "--timeout", "1e300"),
            says("--timeout", "1e+300", "at most"),
        ),
        (("check-env", "frozen_lake", "--timeout", "-1"), "--timeout is -1.0"),
        (("check-env", "frozen_lake", "--episodes", "-3"), says("--episodes", "-3", "at least 1")),
        (("check-env", "frozen_lake", "--budget", "0"), "--budget is 0"),
        (("check-env", "frozen_lake", "--max-steps", "0"), "--max-steps is 0"),
        (
            ("demos", "frozen_lake", "--episodes", str(10**15)),
            says("--episodes", str(10**15), "at most"),
        ),
        (("demos", "frozen_lake", "--policy", "erring", "--error-rate", "nan"), "--error-rate is nan"),
        (("play", "frozen_lake", "--seed", "-1"), says("--seed", "-1", "at least 0")),
        (("make-model", "--out", "none", "--seed", "-1"), says("--seed", "-1", "at least 0")),
        (("rollout", "LAKE", "--batches", "0"), "--batches is 0"),
        (("eval", "LAKE", "--episodes", "-1"), "--episodes is -1"),
        (("eval", "LAKE", "--samples", str(10**15)), f"--samples is {10**15}"),
        (("rollout", "LAKE", "--out", "\udcff"), says(r"'\udcff'", "command line", "UTF-8")),
        (("config", "LAKE", "exp_name=\udcff"), says(r"'exp_name=\udcff'", "command line", "UTF-8")),
        (("config", "\ud800.yaml"), says(r"'\ud800.yaml'", "command line", "UTF-8")),
        (("rollout", "LAKE", "--model", ""), says("--model", "empty")),
        (("train", "LAKE", "--from-rollouts", ""), "--from-rollouts is empty"),
        (("train", "--replay", ""), "--replay is empty"),
        (("play", "frozen_lake", "--policy", ""), "--policy is empty"),
        (("compare", "LAKE", "--out", ""), "--out is empty"),
        (("eval", "LAKE", "--json", ""), "--json is empty"),
        (("config", "--strict"), says("config", "turnwise config FILE")),
        (("sft",), says("sft", "turnwise sft FILE")),
        (("train",), says("train", "turnwise train FILE")),
    ],
    ids=lambda value: (
        " ".join(value).encode("ascii", "backslashreplace").decode() if isinstance(value, tuple) else ""
    ),
)
def test_an_option_that_cannot_be_is_one_sentence(words, message, lake, refused):
    said = refused(*(lake if word == "LAKE" else word for word in words))
    assert re.search(message, said) and said.startswith("error: ") and said.count("\n") == 1


def test_the_rank_that_a_launcher_puts_before_the_words_is_left_out(lake, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        main(["--local_rank=0", "config", lake])
    assert "unrecognized arguments: --local_rank=0" in capsys.readouterr().err
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert main(["--local_rank=0", "config", lake]) == 0


def test_a_reader_that_has_left_ends_a_command_quietly(lake):
    reading, writing = os.pipe()
    os.close(reading)
    done = turnwise("config", lake, stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


CLOSED = """
import os, sys
os.closerange(0, 3)
sys.stdin = sys.stdout = sys.stderr = None  # as Python has them after >&- 2>&- <&-
from turnwise.cli.main import main
sys.exit(main())
"""


def test_a_closed_stream_is_nobody_elses_file(tiny_model, tmp_path):
    (tmp_path / "lake.yaml").write_text(
        f"pretrain: {tiny_model}\nmax_steps: 1\nrollout_batch_size: 2\nsequence_length: 256\noutput_dir: "
        f"{tmp_path}/runs\n"
        "train_env_manager: {num_env_groups: 1, group_size: 2}\ncustom_envs:\n"
        "  Lake: {env_type: frozen_lake, max_steps: 1, max_tokens_per_step: 4, env_config: "
        "{env_instruction: ''}}\n"
    )
    (tmp_path / "closed.py").write_text(CLOSED)
    done = turnwise("train", tmp_path / "lake.yaml", module="closed", cwd=tmp_path)
    assert done.returncode == 0
    [run] = (tmp_path / "runs" / "lake").iterdir()
    assert (run / "checkpoints" / "checkpoint-1").is_dir()
    assert (run / "run.lock").read_text().strip().isdigit(), "what is printed goes into no file of the run"


def test_a_long_output_on_a_full_disk_is_named_and_has_nothing_to_continue(lake):
    with open("/dev/full", "w") as full:
        done = turnwise("config", lake, stdout=full)
    assert done.returncode == 2 and mentions(done.stderr, "output", "written", "No space left")
    assert "resume_from_checkpoint" not in done.stderr and "Traceback" not in done.stderr


def test_a_short_output_on_a_full_disk_is_said_too(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "rollout/score/mean": 1}\n')
    with open("/dev/full", "w") as full:
        done = turnwise("compare", tmp_path, stdout=full)
    assert done.returncode == 2 and mentions(done.stderr, "output", "written", "No space left")
    assert "status 120" not in done.stderr


@pytest.mark.parametrize("words", [["train", "--help"], ["--version"]])
def test_help_on_a_full_disk_is_an_error(words):
    with open("/dev/full", "w") as full:
        done = turnwise(*words, stdout=full)
    assert done.returncode == 2 and mentions(done.stderr, "output", "written", "No space left")


@pytest.mark.parametrize("locale", ["PYTHONIOENCODING=ascii", "LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0"])
def test_a_terminal_of_few_letters_gets_the_rest_written_out(locale, lake):
    env = os.environ | dict(word.split("=") for word in locale.split())
    command = [sys.executable, "-m", "turnwise.cli.main", "config", lake, "output_dir=Füße"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, encoding="utf-8")
    assert done.returncode == 0 and ("F\\xfc\\xdfe" if "ascii" in locale else "Füße") in done.stdout
