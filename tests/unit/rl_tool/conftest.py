"""A tiny model that knows the words of the generated problems."""

from __future__ import annotations

import pytest

from turnwise.data.gsm8k import generate_problems, prompt_of
from turnwise.models.make import make_model

TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
TINY |= {"intermediate_size": 64, "max_position_embeddings": 256}


@pytest.fixture(scope="session")
def word_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("word_model") / "tiny"
    texts = [f"{prompt_of(row['question'])} {row['answer']} Final Answer:" for row in generate_problems(300)]
    make_model("tiny", folder, texts, overrides=TINY)
    return str(folder)


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


class Fragile:
    """A reward that a full disk ends after so many calls."""

    calls_left = 1000
    __name__ = "fragile"

    def __call__(self, completions, **columns):
        self.calls_left -= 1
        if self.calls_left < 0:
            raise OSError("the disk is full")
        return [float(number) for number, _ in enumerate(completions)]


@pytest.fixture
def fragile():
    return Fragile()
