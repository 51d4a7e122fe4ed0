"""The README's own environment runs as it stands, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import forked

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()


def block(language):
    [text] = re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)
    return text


def test_the_custom_environment_trains(tiny_model, tmp_path):
    assert len([line for line in block("python").splitlines() if line.strip()]) <= 15
    (tmp_path / "guess.py").write_text(block("python"))
    (tmp_path / "guess.yaml").write_text(block("yaml"))
    small = ["max_steps=1", "rollout_batch_size=4", "train_env_manager.group_size=4", "sequence_length=512"]
    done = forked.run(["train", "guess.yaml", f"pretrain={tiny_model}", *small], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "step 1/1" in done.stdout and "success" in done.stdout


def test_relative_links_exist():
    documents = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    missing = [
        f"{document.relative_to(ROOT)}: {target}"
        for document in documents
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text())
        if "://" not in target and not (document.parent / target).exists()
    ]
    assert missing == []
