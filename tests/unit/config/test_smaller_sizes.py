"""What is advised where a step takes minutes can be had: each value is one that the config takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from turnwise.config import load_any_config
from turnwise.config.show.sizes import smaller_steps

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
AGENTIC = ("frozen_lake/agentic.yaml", "sokoban/agentic.yaml", "mixed/agentic.yaml")
ONE_GROUP = ["train_env_manager.group_size=4", "rollout_batch_size=4"]
CASES = [("frozen_lake/sft.yaml", []), *((name, changes) for name in AGENTIC for changes in ([], ONE_GROUP))]


@pytest.mark.parametrize(("name", "changes"), CASES)
def test_the_advice_can_be_followed_until_nothing_is_left(name, changes):
    overrides, sizes = ["pretrain=runs/model", *changes], []
    for _ in range(12):
        config, _ = load_any_config(str(EXAMPLES / name), overrides)
        advice = [word for word in smaller_steps(config).replace(",", "").split() if "=" in word]
        sizes.append(len(advice))
        if not advice:
            break
        overrides += advice
    assert sizes[0] > 0 and sizes[-1] == 0
