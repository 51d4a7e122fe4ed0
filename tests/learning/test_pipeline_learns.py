"""The whole library learns from random weights; with the sign of the loss flipped it doesn't."""

from __future__ import annotations

import pytest
from climbed import climb
from small_runs import LETTERS, run_small, small_config, training

from turnwise.batching.pack import pack
from turnwise.batching.plan import denominators
from turnwise.chat.demonstration import encode_demonstration
from turnwise.chat.template import ChatTemplate
from turnwise.models.load import load_model, load_tokenizer, save_model
from turnwise.tracking.jsonl import read_metrics
from turnwise.training.cross_entropy import CrossEntropy
from turnwise.training.optimizer import OptimizerSettings
from turnwise.training.settings import StrategySettings
from turnwise.training.torch_strategy import TorchStrategy


def train(tiny_model, tmp_path, flip, max_steps=35, **model_args):
    bandit = {"env_type": "toy_envs:BanditEnv", "env_config": {"arms": ["Left", "Right"], "best": "Right"}}
    bandit |= {"max_steps": 1, "max_tokens_per_step": 1, "agent_system_template": "", "agent_template": "P"}
    config = small_config(
        tiny_model,
        tmp_path,
        max_steps=max_steps,
        save_steps=0,
        rollout_batch_size=64,
        sequence_length=96,
        actor_train={"model_args": model_args, **training(1e-2, 64)},
        train_env_manager={"num_env_groups": 8, "group_size": 8},
        custom_envs={"Bandit": LETTERS | bandit},
    )
    folder = run_small(config, **({"change": climb} if flip else {})).folder
    return [row["rollout/score/mean"] for row in read_metrics(folder.metrics)]


@pytest.mark.parametrize("flip", [False, pytest.param(True, marks=pytest.mark.extra)])
def test_grpo_finds_the_right_word(tiny_model, tmp_path, flip):
    scores = train(tiny_model, tmp_path, flip)
    if flip:
        assert scores[-1] < 0.05
    else:
        assert scores[0] < 0.3 and scores[-1] > 0.8


@pytest.fixture(scope="module")
def wavering_model(tiny_model, tmp_path_factory):
    """Answers P with each of four words equally often, and knows when to say which. Adapters can't teach a
    new model to: its embeddings, which they leave as they are, are so small that no hidden state tells
    between them."""
    folder = tmp_path_factory.mktemp("models") / "wavering"
    model, tokenizer = load_model(tiny_model), load_tokenizer(tiny_model)
    words = ("Left", "Right", "Up", "Down")
    told = [*(("P", word) for word in words), *((str(number), word) for number, word in enumerate(words))]
    rows = [
        [{"role": "user", "content": prompt}, {"role": "assistant", "content": word}] for prompt, word in told
    ]
    samples = [encode_demonstration(ChatTemplate(tokenizer), row) for row in rows]
    strategy = TorchStrategy(model, StrategySettings(OptimizerSettings(1e-2)))
    for _ in range(60):
        strategy.train_step([pack(samples, denominators(samples, max_length=96))], CrossEntropy())
    save_model(model, tokenizer, folder)
    return folder


@pytest.mark.parametrize("flip", [False, pytest.param(True, marks=pytest.mark.extra)])
def test_adapters_alone_find_it_too(wavering_model, tmp_path, flip):
    scores = train(wavering_model, tmp_path, flip, max_steps=10, lora_rank=4)
    assert 0.1 < scores[0] < 0.4
    last = sum(scores[-3:]) / 3
    assert last < 0.05 if flip else last > 0.9
