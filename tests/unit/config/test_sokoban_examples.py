"""The examples of Sokoban load, strictly, and their environments can be made and played."""

from __future__ import annotations

from pathlib import Path

from turnwise.config import AgenticConfig, SFTConfig, load_config
from turnwise.envs.registry import make_env

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
PUBLISHED = EXAMPLES / "qwen2.5-0.5B-agentic" / "agent_val_sokoban.yaml"


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
