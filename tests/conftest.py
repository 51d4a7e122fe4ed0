"""What tests of several rooms share: a small model folder, made once a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from turnwise.models.make import make_model

TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 64,
    "max_position_embeddings": 512,
}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A Qwen3 of some 20,000 parameters with random weights, and a tokenizer that knows the words of the toy environments."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    words = "<answer>Left</answer> <answer>Down</answer> <answer>Right</answer> <answer>Up</answer> P _ O G X √ 0 1 2 3\n"
    make_model("tiny", folder, [words * 20], overrides=TINY)
    return folder
