"""The README's own environment: its files and commands run with fewer steps and episodes, and with
TURNWISE_FULL as printed, when it learns."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from string import Template
from typing import Any

import pytest

from turnwise.cli.main import main

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CUT = {
    "max_steps: 40": "max_steps: 2",
    "--episodes 3000": "--episodes 200",
    "--episodes 1000": "--episodes 64",
}
"""Sizes of the README, and those that end after seconds."""


def write_files(folder: Path, readme: str) -> str:
    """Writes the files; returns the commands. The last one, `eval`, writes result.json."""
    for text, name in re.findall(r"```\w+\n(# (\w+\.(?:py|yaml))\n.*?)```", readme, re.DOTALL):
        (folder / name).write_text(text, encoding="utf-8")
    assert {path.name for path in folder.iterdir()} == {"guess.py", "guess.yaml", "sft.yaml"}
    [commands] = re.findall(r"```bash\n(turnwise demos .*?)```", readme, re.DOTALL)
    return commands.rstrip() + " --json result.json\n"


def results(folder: Path) -> list[dict[str, Any]]:
    """What `eval` says of the models after SFT and after RL."""
    assert list(folder.glob("runs/guess/*/learning_curve.png"))
    rows = json.loads((folder / "result.json").read_text(encoding="utf-8"))["results"]
    return [row["overall"] for row in rows]


def test_it_runs_with_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process: importing torch in one for each command would take longer than they do."""
    readme = README
    for printed, smaller in CUT.items():
        assert readme.count(printed) == 1, f"the README prints {printed!r} once"
        readme = readme.replace(printed, smaller)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "guess", raising=False)  # another example's module has this name
    folders: dict[str, str] = {}
    for line in write_files(tmp_path, readme).splitlines():
        if newest := re.fullmatch(r"(\w+)=\$\(ls -td (\S+) \| head -1\)", line):
            folders[newest[1]] = max(map(str, tmp_path.glob(newest[2])), key=os.path.getmtime)
            continue
        command, *words = shlex.split(Template(line).substitute(folders))
        assert command == "turnwise" and main(words) == 0, line
    after_sft, after_rl = results(tmp_path)
    assert after_sft["num_episodes"] == after_rl["num_episodes"] == 64


@pytest.mark.skipif(not os.environ.get("TURNWISE_FULL"), reason="takes minutes; make test-full runs it")
def test_as_printed_it_learns(tmp_path: Path) -> None:
    commands = write_files(tmp_path, README)
    place = str(Path(sys.executable).parent)  # of the command `turnwise`
    env = {**os.environ, "PATH": f"{place}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-euc", commands], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    after_sft, after_rl = results(tmp_path)
    assert after_sft["num_episodes"] == after_rl["num_episodes"] == 1000
    assert after_sft["success"] <= 0.60 and after_rl["success"] >= 0.90, done.stdout
