"""What runs on a device computes there what it computes on a CPU."""

from __future__ import annotations

import asyncio
import copy
import json
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from server_contract import prompts_of
from small_runs import measured, run_small, small_config, training
from strategy_contract import LOGPROBS, OUTPUTS, WeightedLoss, metric
from torch.nn.attention import varlen
from toy_model import toy_batches, toy_model, toy_samples

from turnwise.inference.embedded.server import EmbeddedServer
from turnwise.inference.hf_server import HFServer
from turnwise.protocols import InferenceServer
from turnwise.runtime.rank import RankContext
from turnwise.training.optimizer import OptimizerSettings
from turnwise.training.settings import StrategySettings
from turnwise.training.torch_strategy import TorchStrategy
from turnwise.types import Completion, SamplingParams

BATCHES = toy_batches(toy_samples(6), [[0, 3, 5], [1, 2, 4]])


def make_strategy(device, dtype=torch.float32, attention="turnwise_packed"):
    model, rank = toy_model(attn_implementation=attention), RankContext(device=str(device))
    return TorchStrategy(model, StrategySettings(OptimizerSettings(1e-2), dtype=dtype), rank=rank)


def sampled(server: InferenceServer, sampling: SamplingParams, prompts: list[list[int]]) -> list[Completion]:
    async def all_of_them() -> list[Completion]:
        requests = [server.generate(ids, sampling, str(number)) for number, ids in enumerate(prompts)]
        completions = await asyncio.gather(*requests)
        await server.close()
        return completions

    return asyncio.run(all_of_them())


def test_passes_and_steps_are_those_of_a_cpu(device):
    here, there = make_strategy(torch.device("cpu")), make_strategy(device)
    for expected, got in zip(here.forward(BATCHES, OUTPUTS), there.forward(BATCHES, OUTPUTS), strict=True):
        for name in OUTPUTS:
            np.testing.assert_allclose(got[name], expected[name], atol=1e-4)
    norms = [metric(strategy.train_step(BATCHES, WeightedLoss()), "grad_norm") for strategy in (here, there)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)
    assert {tensor.device.type for _, tensor in there.weights()} == {device.type}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_packed_sequences_are_kept_apart_by_every_attention(device, dtype, monkeypatch):
    """A GPU takes varlen kernels in 16 bits, and SDPA otherwise."""
    kernel, calls = varlen.varlen_attn, []
    monkeypatch.setattr(
        varlen, "varlen_attn", lambda *args, **options: calls.append(args) or kernel(*args, **options)
    )
    packed = make_strategy(device, dtype).forward(BATCHES, LOGPROBS)
    assert bool(calls) == (
        device.type == "cuda" and dtype != torch.float32 and torch.cuda.get_device_capability() >= (8, 0)
    )
    exact = make_strategy(torch.device("cpu"), attention="eager").forward(BATCHES, LOGPROBS)
    bound = 1e-4 if dtype == torch.float32 else 0.1
    for got, expected in zip(packed, exact, strict=True):
        assert abs(got["logprobs"] - expected["logprobs"]).mean() <= bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_training_in_sixteen_bits_lowers_the_loss(device, dtype):
    strategy = make_strategy(device, dtype)
    measured = [strategy.train_step(BATCHES, WeightedLoss()) for _ in range(8)]
    losses = [metric(metrics, "loss") for metrics in measured]
    assert losses[-1] < losses[0] and metric(measured[-1], "skipped_steps") == 0


def test_what_is_offloaded_leaves_the_device_and_comes_back(device):
    strategy = make_strategy(device)
    strategy.train_step(BATCHES, WeightedLoss())
    before = strategy.forward(BATCHES, LOGPROBS)
    strategy.offload(["weights", "optimizer"])
    assert {parameter.device.type for parameter in strategy.model.parameters()} == {"cpu"}
    strategy.onload(["weights", "optimizer"])
    assert {parameter.device.type for parameter in strategy.model.parameters()} == {device.type}
    np.testing.assert_equal(strategy.forward(BATCHES, LOGPROBS), before)
    strategy.train_step(BATCHES, WeightedLoss())


@pytest.mark.parametrize("kind", [EmbeddedServer, HFServer])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_servers_say_the_trainers_log_probs(device, kind, dtype):
    """The parity gate's bound in fp32, 1e-3 nats in the mean, and half of it in 16 bits."""
    model = toy_model().to(device)
    served = copy.deepcopy(model).to(dtype)
    prompts = prompts_of(model, 4)
    completions = sampled(kind(served, max_length=96), SamplingParams(24, seed=3), prompts)
    differences = []
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = torch.tensor([[*prompt, *completion.token_ids.tolist()]], device=device)
        with torch.no_grad():
            logprobs = model(ids).logits[0].float().log_softmax(-1)
        rows = torch.arange(len(prompt), ids.shape[1], device=device)
        expected = logprobs[rows - 1, ids[0, rows]].cpu().numpy()
        differences.append(abs(completion.logprobs - expected))
    assert np.concatenate(differences).mean() <= (1e-3 if dtype == torch.float32 else 5e-2)


def test_greedy_answers_are_those_of_generate(device):
    model = toy_model().to(device)
    prompts = prompts_of(model, 6)
    greedy = SamplingParams(12, temperature=0.0)
    for prompt, completion in zip(
        prompts, sampled(EmbeddedServer(model, max_length=96), greedy, prompts), strict=True
    ):
        ids = torch.tensor([prompt], device=device)
        settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        assert completion.token_ids.tolist() == expected[0, len(prompt) :].tolist()


ROLES = ("actor_train", "actor_infer", "critic", "reference")
LORA = {"lora_rank": 4, "lora_dropout": 0.1}
NEEDS_PEFT = pytest.mark.skipif(find_spec("peft") is None, reason="LoRA needs peft, which isn't installed")
PPO = {"adv_estimator": "gae", "critic": training(1e-3), "use_kl_loss": True}
"""Three models of their own beside the server, which share a card."""


@pytest.mark.parametrize(
    ("dtype", "policy", "changes"),
    [
        ("fp32", {}, {}),
        ("bf16", {}, {}),
        ("fp16", {}, {}),
        ("bf16", {}, PPO),
        pytest.param("bf16", LORA, {"use_kl_loss": True}, marks=NEEDS_PEFT),
    ],
    ids=["fp32", "bf16", "fp16", "critic and reference", "LoRA"],
)
def test_a_whole_run_trains_and_its_parity_gate_passes(device, tiny_model, tmp_path, dtype, policy, changes):
    roles = {role: {**changes.get(role, {}), "model_args": {"dtype": dtype}} for role in ROLES}
    roles["actor_train"] = training(1e-3) | {"model_args": {"dtype": dtype, **policy}}
    pipeline = run_small(small_config(tiny_model, tmp_path, max_steps=3, **changes | roles))
    assert pipeline.checkpoints.num_done == 3
    assert pipeline.actor_infer.info().model.device.startswith(device.type)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_deterministic_run_repeats_itself(device, tiny_model, tmp_path, dtype):
    """torch refuses there what adds up in no fixed order: sums of probabilities, and products without a
    workspace."""
    role = training(1e-3) | {"model_args": {"dtype": dtype}}
    runs = [
        run_small(
            small_config(tiny_model, tmp_path / name, max_steps=2, actor_train=role, deterministic=True)
        )
        for name in "ab"
    ]
    torch.use_deterministic_algorithms(False)
    assert measured(runs[0].folder) == measured(runs[1].folder)


@NEEDS_PEFT
def test_a_run_goes_on_from_its_checkpoint_as_if_it_had_not_stopped(device, tiny_model, tmp_path):
    changes = {"actor_train": training(1e-3) | {"model_args": LORA}, "deterministic": True}
    whole = run_small(small_config(tiny_model, tmp_path / "whole", max_steps=3, **changes))
    run_small(small_config(tiny_model, tmp_path / "cut", max_steps=2, **changes))
    resumed = run_small(
        small_config(tiny_model, tmp_path / "cut", max_steps=3, resume_from_checkpoint=True, **changes)
    )
    torch.use_deterministic_algorithms(False)
    assert measured(resumed.folder)[-1] == measured(whole.folder)[-1]


def test_two_ranks_train_on_two_cards(tiny_model, tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip(f"this machine has {torch.cuda.device_count()} GPUs; two ranks over NCCL need two")
    config = small_config(
        tiny_model, tmp_path, max_steps=3, actor_train=training(1e-3) | {"device_mapping": [0, 1]}
    )
    assert run_small(config).checkpoints.num_done == 3


def test_the_benchmark_runs_at_toy_size(tmp_path, monkeypatch):
    """Its figures mean nothing here; what it calls must be there."""
    script, out = Path(__file__).parents[2] / "benchmarks" / "gpu.py", tmp_path / "gpu.json"
    monkeypatch.setattr(sys, "argv", [script.name, "--size", "toy", "--rounds", "1", "--out", str(out)])
    monkeypatch.syspath_prepend(script.parent)
    runpy.run_path(str(script), run_name="__main__")
    result = json.loads(out.read_text())
    assert (
        result["decode"]["4"]["tokens_per_s"]["embedded"] > 0
        and result["decode"]["4"]["embedded / generate"] > 0
        and result["train"]["tokens_per_s"] > 0
        and result["step"]["parameters"] == result["train"]["parameters"]
    )
