"""What is advised where a step takes minutes can be had: each value is one that the config takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from turnwise.config import load_any_config

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
FILES = ["frozen_lake/agentic.yaml", "frozen_lake/sft.yaml", "sokoban/agentic.yaml", "mixed/agentic.yaml"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("changes", [[], ["train_env_manager.group_size=4", "rollout_batch_size=4"]])
def test_the_advice_can_be_followed_until_nothing_is_left(name, changes):
    from turnwise.config.sizes import smaller_steps

    if "sft" in name:
        changes = []
    if not (EXAMPLES / name).exists():
        pytest.skip(f"no example {name}")
    overrides, sizes = ["pretrain=runs/model", *changes], []
    for _ in range(12):
        config, _ = load_any_config(str(EXAMPLES / name), overrides)
        advice = [word for word in smaller_steps(config).replace(",", "").split() if "=" in word]
        sizes.append(len(advice))
        if not advice:
            break
        overrides += advice
    assert sizes[0] > 0 and sizes[-1] == 0
