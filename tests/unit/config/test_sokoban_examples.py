"""The examples of Sokoban load, strictly, and their environments can be made and played."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from turnwise.config import AgenticConfig, SFTConfig, describe, load_config
from turnwise.envs.registry import make_env

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
PUBLISHED = EXAMPLES / "qwen2.5-0.5B-agentic" / "agent_val_sokoban.yaml"


@pytest.mark.parametrize("name", ["agentic", "ppo", "rloo", "gigpo"])
def test_a_config_of_the_tiny_model_is_strictly_valid(name: str) -> None:
    config, notes = load_config(EXAMPLES / "sokoban" / f"{name}.yaml", ["pretrain=models/tiny"], AgenticConfig, strict=True)
    assert notes == [] and describe(config).warnings == []
    assert config.env_manager("train").tags == ["Sokoban"]


def test_the_context_of_a_whole_episode_is_fine_tuned() -> None:
    agentic, _ = load_config(EXAMPLES / "sokoban" / "agentic.yaml", [], AgenticConfig)
    sft, _ = load_config(EXAMPLES / "sokoban" / "sft.yaml", [], SFTConfig, strict=True)
    assert sft.sequence_length == agentic.sequence_length


def test_each_published_environment_shows_its_own_symbols() -> None:
    config, _ = load_config(PUBLISHED, [], AgenticConfig)
    shown = {}
    for tag, env in config.custom_envs.items():
        observation, info = make_env(env.env_type, env.env_config, "val").reset(seed=0)
        shown[tag] = set(str(observation).split())
        assert all(symbol in info["env_instruction"] for symbol in shown[tag])
    assert {"#", "_", "X"} < shown["SimpleSokoban"] < set("#_O√XPS")
    assert {"W", ".", "B"} < shown["SokobanDifferentGridVocab"] < set("W.GCBA@")
    assert len(shown) == 4


def test_the_published_run_script_reaches_train_from_anywhere(tmp_path: Path) -> None:
    script = PUBLISHED.parent / "run_agentic_pipeline_sokoban.sh"
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 2
    assert "can't run here" in done.stderr and "vllm" in done.stderr
