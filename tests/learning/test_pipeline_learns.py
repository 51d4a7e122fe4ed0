"""The whole library learns from random weights; with the sign of the advantages flipped it doesn't."""

from __future__ import annotations

import pytest

from turnwise.config import AgenticConfig, parse_config
from turnwise.pipelines.build import build_agentic
from turnwise.pipelines.build_run import start_run
from turnwise.tracking.jsonl import read_metrics


class Unlearner:
    """GRPO with its advantages turned round."""

    def __init__(self, algorithm):
        self._algorithm = algorithm
        self.needs, self.loss, self.running = algorithm.needs, algorithm.loss, None

    def credit(self, groups):
        metrics = self._algorithm.credit(groups)
        for group in groups:
            for sample in group.samples:
                sample.advantages = -sample.advantages
        return metrics


def train(tiny_model, tmp_path, flip):
    values = {
        "pretrain": str(tiny_model),
        "output_dir": str(tmp_path),
        "max_steps": 35,
        "save_steps": 0,
        "rollout_batch_size": 64,
        "sequence_length": 96,
        "track_with": [],
        "actor_train": {"training_args": {"learning_rate": 1e-2, "per_device_train_batch_size": 64}},
        "train_env_manager": {"num_env_groups": 8, "group_size": 8},
        "custom_envs": {
            "Bandit": {
                "env_type": "turnwise.testing.toy_envs:BanditEnv",
                "env_config": {"arms": ["Left", "Right"], "best": "Right"},
                "max_steps": 1,
                "max_tokens_per_step": 1,
                "agent_system_template": "",
                "agent_template": "P",
                "action_pattern": None,
            }
        },
    }
    config, _ = parse_config(values, AgenticConfig)
    folder = start_run(config)
    pipeline = build_agentic(config, folder)
    if flip:
        pipeline.algorithm = Unlearner(pipeline.algorithm)
    try:
        pipeline.run()
    finally:
        pipeline.close()
    return [row["rollout/score/mean"] for row in read_metrics(folder.metrics)]


@pytest.mark.parametrize("flip", [False, True])
def test_grpo_finds_the_right_word(tiny_model, tmp_path, flip):
    scores = train(tiny_model, tmp_path, flip)
    if flip:
        assert scores[-1] < 0.05
    else:
        assert scores[0] < 0.3 and scores[-1] > 0.8
