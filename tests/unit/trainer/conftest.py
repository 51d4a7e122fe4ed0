"""What the trainers of these tests are told."""

from __future__ import annotations

import pytest


@pytest.fixture
def small_keys(tiny_model, tmp_path):
    """A run of two steps, without anything to train on."""
    return {
        "model": tiny_model,
        "max_steps": 2,
        "save_steps": 0,
        "rollout_batch_size": 4,
        "val_batch_size": 2,
        "sequence_length": 128,
        "output_dir": tmp_path / "runs",
        "track_with": [],
        "is_quiet": True,
        "train_env_manager": {"num_env_groups": 2, "group_size": 2},
        "val_env_manager": {"num_env_groups": 2},
        "actor_train": {"training_args": {"learning_rate": 1e-3}},
    }
