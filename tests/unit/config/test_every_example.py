"""Every shipped example passes `turnwise config` as it stands, and its first lines have one command that runs
it."""

from __future__ import annotations

import re
import runpy
import shutil
from pathlib import Path

import pytest
import yaml

from turnwise.cli.main import build_parser, main

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted(
    path.relative_to(ROOT)
    for path in (ROOT / "examples").rglob("*")
    if path.suffix in (".yaml", ".py", ".sh")
)
PARTS = {path for path in EXAMPLES if path.parent.name == "config"}
"""What other files include."""
LAUNCHES = {path for path in EXAMPLES if path.parent.name == "accelerate"}
"""Configs of accelerate (`tests/parity/test_accelerate.py`)."""
TOOLS = {path for path in EXAMPLES if path.name in ("tools.yaml", "gsm8k_tool_config.yaml")}
"""Files that `agent.tool_config_path` names."""
OF_VERIFIERS = {path for path in EXAMPLES if path.parent.name == "verifiers" and path.suffix == ".py"}
"""Scripts that import verifiers, which `tests/engines/contract_verifiers.py` runs."""
PLAYERS = {path for path in EXAMPLES if path.parent.name == "gateway" and path.suffix == ".py"} | {
    path for path in OF_VERIFIERS if path.name != "rows.py"
}
"""Agents, and what they name, that the configs beside them name."""
CONFIGS = [path for path in EXAMPLES if path.suffix == ".yaml" and path not in PARTS | LAUNCHES | TOOLS]


@pytest.mark.parametrize("path", CONFIGS, ids=str)
def test_an_example_passes_strictly_as_it_stands(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Not in the checkout: whoever has trained there has models and rows, which are then examined too.
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    assert main(["config", str(path), "--strict"]) == 0, capsys.readouterr().err
    assert "far from the usual" not in capsys.readouterr().out


@pytest.mark.parametrize("path", [path for path in EXAMPLES if path not in PARTS | TOOLS | PLAYERS], ids=str)
def test_the_first_lines_name_one_command(path: Path) -> None:
    first = "\n".join((ROOT / path).read_text(encoding="utf-8").splitlines()[:16]).replace("\\\n", "")
    if path.name == "start_agentic_pipeline.py":
        assert "python examples/start_agentic_pipeline.py --config_path DIR --config_name NAME" in first
        return
    commands = [
        line.strip("# \t")
        for line in first.splitlines()
        if re.search(rf"(turnwise|python|bash|accelerate) .*{path.name}", line)
    ]
    assert commands, f"{path} names no command with itself in it"
    assert "MODEL_DIR" not in commands[0]
    for command in (part.split() for text in commands for part in text.split("&&")):
        if command[0] == "turnwise" and path.name in " ".join(command):
            options = build_parser().parse_known_args(command[1:])[0]
            is_sft = "train_files" in yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))
            assert command[1] == ("sft" if is_sft else "train") and Path(options.config) == path


SCRIPTS = [path for path in EXAMPLES if path.suffix == ".py" and path not in OF_VERIFIERS]


@pytest.mark.parametrize("path", SCRIPTS, ids=str)
def test_what_a_script_imports_is_there(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if path.stem == "with_agents_sdk":
        pytest.importorskip("agents", reason="openai-agents isn't installed")
    monkeypatch.syspath_prepend(ROOT / path.parent)
    script = runpy.run_path(str(ROOT / path), run_name="imported")
    assert callable(script["play" if path in PLAYERS and "main" not in script else "main"])


@pytest.mark.parametrize("path", sorted(PARTS), ids=str)
def test_what_others_include_makes_a_config_with_an_environment(path: Path, tmp_path: Path) -> None:
    shutil.copytree(ROOT / path.parent, tmp_path / "config")
    text = (ROOT / path).read_text(encoding="utf-8")
    named = [
        line.strip("# ") for line in text.splitlines() if line.startswith("#") and "custom_envs:" in line
    ]
    env = named[0] if named else "custom_envs: {Lake: {env_type: frozen_lake}}"
    (tmp_path / "own").mkdir()
    own = tmp_path / "own" / "own.yaml"
    own.write_text(
        f"defaults:\n  - ../config/{path.stem}@_here_\n  - _self_\npretrain: runs/model\n{env}\n",
        encoding="utf-8",
    )
    assert main(["config", str(own)]) == 0


def test_a_config_without_a_model_says_how_one_is_made_or_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.yaml").write_text("custom_envs: {Lake: {env_type: frozen_lake}}\n", encoding="utf-8")
    assert main(["config", str(tmp_path / "own.yaml")]) == 2
    told = capsys.readouterr().err
    assert "turnwise make-model" in told and "Hugging Face" in told and "pretrain" in told
