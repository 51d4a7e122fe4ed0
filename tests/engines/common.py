"""The model, the tokens and the loss on which the engines are compared with plain torch. Runs in every
engine's environment."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import torch
from letters import small_qwen3
from transformers import PreTrainedModel, Qwen3ForCausalLM

VOCABULARY = 128
EPS = 1e-4
"""Adam's ε. With the usual 1e-8 the first steps of parameters without a gradient follow the sign of rounding
errors."""


def toy_model(seed: int = 0) -> PreTrainedModel:
    """A random Qwen3 in fp32, the same in every process."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCABULARY,
        "intermediate_size": 128,
        "initializer_range": 0.06,
        "attn_implementation": "eager",
    }
    return Qwen3ForCausalLM(small_qwen3(**sizes)).eval()


def toy_tokens(num_sequences: int = 8, length: int = 24) -> torch.Tensor:
    """int64 [num_sequences, length]"""
    return torch.randint(0, VOCABULARY, (num_sequences, length), generator=torch.Generator().manual_seed(1))


def loss(logits: torch.Tensor, tokens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Σ −log p(token | those before it) / num_tokens: a sum over a global denominator, as all losses of the
    package."""
    logprobs = torch.log_softmax(logits[:, :-1], -1).gather(-1, tokens[:, 1:, None])
    return -logprobs.sum() / num_tokens


def gradient(model: PreTrainedModel, tokens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """[P], all parameters in their order."""
    model.zero_grad()
    loss(model(tokens).logits, tokens, num_tokens).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()]).clone()


def trained_by_torch(tokens: torch.Tensor, num_steps: int, lr: float) -> torch.Tensor:
    """[P]: what `num_steps` of plain AdamW add to the toy model's parameters."""
    model = toy_model()
    before = flat(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, eps=EPS, weight_decay=0.0)
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss(model(tokens).logits, tokens, tokens.numel()).backward()
        optimizer.step()
    return flat(model) - before


def flat(model: torch.nn.Module) -> torch.Tensor:
    """[P], all parameters in their order."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def run_ranks(script: str, num_ranks: int, timeout_s: float = 300) -> None:
    """Runs `script rank` in that many processes that find each other, and fails where one of them does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(num_ranks),
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, script, "rank"],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(num_ranks)
    ]
    try:
        statuses = [rank.wait(timeout=timeout_s) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert not any(statuses), f"exit statuses of the ranks: {statuses}"
