"""Samples of `mode: step` that begin alike are computed once, with the losses and gradients of each alone."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

import numpy as np
import torch
from toy_envs import IdentityEnv
from toy_model import toy_model

from turnwise.agents.env_agent import EnvAgent, EnvAgentSettings
from turnwise.algorithms.losses import PolicyLoss
from turnwise.algorithms.settings import AlgorithmSettings
from turnwise.batching.pack import pack
from turnwise.batching.plan import denominators
from turnwise.batching.samples import build_samples
from turnwise.chat.contexts import TokenContexts
from turnwise.chat.template import ChatTemplate
from turnwise.pipelines.model_role import BatchPlan
from turnwise.testing.fakes import ScriptedServer, byte_tokenizer
from turnwise.training.torch_strategy import TorchStrategy
from turnwise.types import Sample, SamplingParams, Task

NUM_TURNS = 3
RULES = "Say what you are shown, one letter each turn, and nothing else. "


def step_mode_samples() -> list[Sample]:
    """Two siblings of each of two tasks: one answers well, the other badly at its second turn."""
    template = ChatTemplate(byte_tokenizer())
    settings = EnvAgentSettings(
        "Letters",
        max_tokens_per_step=4,
        turn_template=RULES + "{history}{observation}",
        action_pattern=None,
        mode="step",
    )
    agent = EnvAgent(lambda task: IdentityEnv(num_turns=NUM_TURNS), settings)
    samples = []
    for seed, sibling in itertools.product(range(2), range(2)):
        answers = ["a", "b" if sibling else "a", "a"]
        contexts = TokenContexts(
            template, ScriptedServer([template.respond(a) for a in answers]), 512, f"{seed}/{sibling}"
        )
        task = Task(f"train/Letters/{seed}", "Letters", "train", seed)
        [trajectory] = asyncio.run(agent.run(task, sibling, contexts, SamplingParams(4)))
        samples += build_samples(trajectory)
    rng = np.random.default_rng(0)
    for sample in samples:
        sample.advantages = np.where(sample.response_mask, rng.standard_normal(), 0).astype(np.float32)
        sample.old_logprobs = sample.rollout_logprobs = np.where(sample.response_mask, -1.0, 0).astype(
            np.float32
        )
    return samples


def run(samples: list[Sample], cuts: list[list[int]], attention: str | None):
    """Loss, gradients, and the token counts of what was computed."""
    size = {"vocab_size": 512, "max_position_embeddings": 512}
    model = toy_model(**size, **({"attn_implementation": attention} if attention else {}))
    strategy, loss = TorchStrategy(model), PolicyLoss(AlgorithmSettings())
    model.requires_grad_(True)
    total = 0.0
    for cut in cuts:
        batch = pack([samples[i] for i in cut], denominators(samples, 512)).map(torch.as_tensor)
        value, _ = loss(strategy._compute(batch, loss.outputs), batch)
        value.backward()
        total += value.item()
    return total, [p.grad for p in model.parameters()], strategy._take_counts()


def test_prefixes_of_steps_are_merged_in_one_micro_batch_with_the_same_loss_and_gradients() -> None:
    samples = step_mode_samples()
    assert len(samples) == 4 * NUM_TURNS
    shuffled = [samples[i] for i in np.random.default_rng(1).permutation(len(samples))]
    plan = BatchPlan(samples_per_step=12, max_length=512, seed=0)
    num_tokens = sum(sample.num_tokens for sample in samples)
    [together] = plan.cut(shuffled, max_tokens=num_tokens)
    expected, expected_gradients, alone = run(shuffled, [[i] for i in range(len(samples))], "eager")
    loss, gradients, merged = run(shuffled, [together], None)
    assert abs(loss - expected) <= 1e-6
    for value, reference in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(value, reference, rtol=1e-3, atol=1e-5)
    assert alone.padding_share == alone.merged_share == merged.padding_share == 0.0
    # What the rules take is computed once for all turns and siblings, and last tokens not at all.
    distinct = {tuple(s.token_ids[:n].tolist()) for s in samples for n in range(1, s.num_tokens)}
    assert merged.distinct == len(distinct) < 0.5 * num_tokens


def test_steps_of_one_prompt_stay_together_where_a_batch_is_cut() -> None:
    samples = step_mode_samples()
    for index, sample in enumerate(samples):
        # Another game for each second sample, by its very first token.
        samples[index] = replace(sample, token_ids=np.concatenate([[7 + index % 2], sample.token_ids[1:]]))
    half = sum(sample.num_tokens for sample in samples[::2])
    cuts = BatchPlan(samples_per_step=12, max_length=512, seed=0).cut(samples, max_tokens=half)
    assert {frozenset(cut) for cut in cuts} == {frozenset(range(0, 12, 2)), frozenset(range(1, 12, 2))}
