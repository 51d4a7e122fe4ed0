"""The README's own environment learns: its files and commands, as printed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_as_printed(tmp_path: Path) -> None:
    for text, name in re.findall(r"```\w+\n(# (\w+\.(?:py|yaml))\n.*?)```", README, re.DOTALL):
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert {path.name for path in tmp_path.iterdir()} == {"guess.py", "guess.yaml", "sft.yaml"}
    [commands] = re.findall(r"```bash\n(turnwise demos .*?)```", README, re.DOTALL)
    commands = commands.rstrip() + " --json result.json\n"  # of the last one, eval

    folder = str(Path(sys.executable).parent)  # where the command `turnwise` lies
    env = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-euc", commands], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr

    results = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))["results"]
    after_sft, after_rl = (result["overall"] for result in results)
    assert after_sft["num_episodes"] == after_rl["num_episodes"] == 1000
    assert after_sft["success"] <= 0.60, done.stdout
    assert after_rl["success"] >= 0.90, done.stdout
    assert list(tmp_path.glob("runs/guess/*/learning_curve.png"))
