"""A working directory, the config of a small run, and commands that must fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from small_runs import LETTERS, SMALL

from turnwise.cli.main import main


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def job(tiny_model, folder):
    """Writes the config of a small run, with changes of its environment and of its keys; returns the file's
    name."""

    def write(env=None, **changes):
        values = SMALL | {
            "exp_name": "job",
            "pretrain": str(tiny_model),
            "output_dir": "runs",
            "max_steps": 2,
        }
        values |= {"custom_envs": {"Letters": LETTERS | (env or {})}} | changes
        Path("job.yaml").write_text(yaml.safe_dump(values))
        return "job.yaml"

    return write


@pytest.fixture
def calculations(tiny_model, folder):
    """Writes the config of a few rows to calculate, each with its agent, and the calculator; returns the
    file's name."""

    def write(agents, **changes):
        rows = [
            {"prompt": text, "answer": str(eval(text)), "agent_name": agent} for text, agent in agents.items()
        ]
        Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        Path("tools.yaml").write_text("tools: [{class_name: calculator}]")
        values = {
            "pretrain": str(tiny_model),
            "sequence_length": 500,
            "agent": {"tool_config_path": "tools.yaml"},
        }
        values |= {"data": {"train_files": "rows.jsonl", "reward": "exact_match"}} | changes
        Path("rows.yaml").write_text(yaml.safe_dump(values))
        return "rows.yaml"

    return write


@pytest.fixture
def refused(capsys):
    """Runs a command that must fail; returns its error, which fits on a screen. A traceback is that of a
    user's own code."""

    def run(*arguments, shows_trace=False):
        capsys.readouterr()
        assert main([str(argument) for argument in arguments]) == 2
        said = capsys.readouterr().err
        assert "error: " in said and len(said.splitlines()) <= 40, said
        assert shows_trace or "Traceback" not in said
        return said

    return run


@pytest.fixture
def counting_env(folder):
    """Writes an environment that counts its resets in `made`, and runs some lines before each; returns its
    settings."""

    def write(*lines):
        (folder / "counting.py").write_text(
            "import signal\n"
            "from toy_envs import LettersEnv\n\n\n"
            "class Mine(LettersEnv):\n"
            "    made = 0\n\n"
            "    def reset(self, *, seed=None):\n"
            "        Mine.made += 1\n"
            + "".join(f"        {line}\n" for line in lines)
            + "        return super().reset(seed=seed)\n"
        )
        return {"env_type": "counting:Mine"}

    return write
