"""`examples/single_file_grpo.py` is the library in one file: three steps give its tokens exactly and its
losses within 1e-5."""

from __future__ import annotations

import ast
import copy
import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from turnwise.config import AgenticConfig, load_config
from turnwise.examine.algorithm import algorithm_settings

ROOT = Path(__file__).parents[2]
FILE = ROOT / "examples" / "single_file_grpo.py"
IMPORTS = {"torch", "transformers", "numpy", "turnwise.envs.frozen_lake.env"}
MARGIN = 1e-5
"""Forward passes that batch differently differ by some 1e-7 in a probability: a number drawn this close to
the edge between two tokens may fall on either side of it."""


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("single_file_grpo", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def settings_of(example, config: AgenticConfig):
    """What the library's config means in the example's words."""
    env, training = config.custom_envs["FrozenLake"], config.actor_train.training_args
    parameters = algorithm_settings(config).variant_parameters()
    assert parameters["clip_low"] == parameters["clip_high"]
    return example.Settings(
        steps=config.max_steps,
        seed=config.seed,
        num_groups=config.train_env_manager.num_env_groups,
        group_size=config.train_env_manager.group_size,
        lake_size=env.env_config["size"],
        max_turns=env.max_steps,
        max_tokens_per_turn=env.max_tokens_per_step,
        sequence_length=config.sequence_length,
        system_prompt=env.agent_system_template,
        temperature=config.sampling("train").temperature,
        clip=parameters["clip_low"],
        dual_clip=parameters["dual_clip"],
        entropy_coef=config.entropy_loss_coef,
        samples_per_step=config.actor_train.samples_per_optimizer_step,
        learning_rate=training.learning_rate,
        warmup_steps=training.warmup_steps,
        adam_beta2=training.adam_beta2,
        max_grad_norm=config.max_grad_norm,
    )


def test_its_defaults_are_the_main_example(example):
    config, _ = load_config(ROOT / "examples" / "frozen_lake" / "agentic.yaml")
    assert (
        config.rollout_batch_size
        == config.train_env_manager.num_env_groups * config.train_env_manager.group_size
    )
    assert settings_of(example, config) == example.Settings()


def test_it_imports_the_environment_and_nothing_else_of_the_library():
    tree = ast.parse(FILE.read_text(encoding="utf-8"))
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name for name in modules if name.partition(".")[0] not in sys.stdlib_module_names} <= IMPORTS | {
        "torch.optim"
    }


def test_three_steps_give_the_tokens_and_the_losses_of_the_library(example, lake_config, plain):
    config, run = lake_config(), plain
    settings = settings_of(example, config)
    model = AutoModelForCausalLM.from_pretrained(config.pretrain, dtype=torch.float32).eval()
    player = copy.deepcopy(model)
    rollouts, num_sampled = iter(run.rollouts), 0
    steps = example.train(
        model, example.Chat(AutoTokenizer.from_pretrained(config.pretrain), model), settings
    )
    for (episodes, metrics), expected in zip(steps, run.metrics, strict=True):
        for episode in episodes:
            assert_same_episode(example, episode, next(rollouts), player)
            num_sampled += sum(episode.is_sampled)
        assert 0 < metrics["score"] < 1 and metrics["pg_loss"] != 0, "nothing was learnt from this step"
        loss = metrics["pg_loss"] - settings.entropy_coef * metrics["entropy"]
        numbers = (loss, metrics["pg_loss"], metrics["grad_norm"], metrics["score"])
        names = ("actor/total_loss", "actor/pg_loss", "actor_train/grad_norm", "rollout/score/mean")
        assert numbers == pytest.approx([expected[name] for name in names], rel=0, abs=1e-5)
        player.load_state_dict(model.state_dict())
    assert len(run.metrics) == 3 and num_sampled > 1000 and next(rollouts, None) is None

    moved = 0.0
    before = AutoModelForCausalLM.from_pretrained(config.pretrain).state_dict()
    for name, weight in run.weights.items():
        difference = (model.state_dict()[name] - weight).abs()
        assert difference.mean() <= 1e-6 and difference.max() <= 1e-4, name
        moved = max(moved, (before[name] - weight).abs().max().item())
    assert moved > 1e-3


def assert_same_episode(example, episode, row, model):
    """The same tokens, sampled in the same places, with the same log-probs."""
    ids, is_sampled, logprobs = [], [], []
    for index, turn in enumerate(row["turns"]):
        for is_response, tokens in ((False, turn["prompt_ids"]), (True, turn["response_ids"])):
            for offset, token in enumerate(tokens):
                at = len(ids)
                if (
                    is_response
                    and at < len(episode.ids)
                    and episode.ids[:at] == ids
                    and episode.ids[at] != token
                ):
                    explain(example, row, index, offset, ids, (episode.ids[at], token), model)
                ids.append(token)
                is_sampled.append(is_response)
        logprobs += [0.0] * len(turn["prompt_ids"]) + turn["logprobs"]
    assert episode.ids == ids and episode.is_sampled == is_sampled
    np.testing.assert_allclose(episode.logprobs, logprobs, atol=1e-5, rtol=0)
    assert episode.score == row["score"]


@torch.no_grad()
def explain(example, row, turn, offset, context, tokens, model):
    """Fails, saying how far the random number of the first differing token is from the edge between the two
    tokens."""
    seed = example.derive_seed(
        example.derive_seed(row["task"]["seed"], "tokens", row["sibling"]), "context", 0
    )
    number = example.uniform(example.derive_seed(seed, turn), offset)
    cumulative = torch.softmax(model(torch.tensor([context])).logits[0, -1], -1).cumsum(-1)
    margin = min(abs(number - cumulative[token - i].item()) for token in tokens for i in (0, 1) if token >= i)
    where = (
        f"{row['task']['id']}, sibling {row['sibling']}, turn {turn}, token {offset}: example and "
        f"library drew {tokens}"
    )
    cause = (
        "a rounding at the edge between two tokens: take another seed"
        if margin < MARGIN
        else "another distribution or seed"
    )
    pytest.fail(f"{where}; the random number is {margin:.1e} from an edge of them, so this is {cause}")
