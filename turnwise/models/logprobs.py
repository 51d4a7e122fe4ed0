"""Log-probs and entropies of tokens under softmax(logits / temperature), without keeping [N, V].

A chunk of rows at a time: the forward pass keeps one number a row, the backward pass computes the logits again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_CHUNK_ELEMENTS = 2**25
"""Logits held at once (128 MiB in fp32)."""


def token_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-probs [N] of `targets` [N], and entropies [N] in nats of the whole distribution, at hidden states [N, H].

    With z = hidden · weightᵀ / temperature, weight [V, H]: log p = z_target − logsumexp z, entropy = −Σ p log p. The product
    runs in autocast's dtype where autocast is on, everything after it in fp32 (or fp64). Differentiable in both results.

    >>> hidden, weight = torch.zeros(1, 2), torch.ones(4, 2)
    >>> logprobs, entropy = token_logprobs(hidden, weight, torch.tensor([3]), with_entropy=True)
    >>> logprobs.exp().item(), round(entropy.exp().item(), 4)
    (0.25, 4.0)
    """
    device_type = hidden.device.type
    compute = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else hidden.dtype
    with torch.autocast(device_type, enabled=False):
        logprobs, entropy = _TokenLogprobs.apply(hidden, weight, targets, temperature, with_entropy, compute)
    return logprobs, (entropy if with_entropy else None)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        with_entropy: bool,
        compute: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        precise = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, log_z, entropy = (hidden.new_zeros(len(hidden), dtype=precise) for _ in range(3))
        matrix = weight.to(compute)
        for rows in _chunks(len(hidden), len(weight)):
            z = (hidden[rows].to(compute) @ matrix.T).to(precise).div_(temperature)
            log_z[rows] = torch.logsumexp(z, -1)
            logprobs[rows] = z.gather(-1, targets[rows, None]).squeeze(-1) - log_z[rows]
            if with_entropy:
                p = torch.exp(z - log_z[rows, None])
                entropy[rows] = log_z[rows] - p.mul_(z).sum(-1)
        ctx.save_for_backward(hidden, weight, targets, log_z, entropy)
        ctx.temperature, ctx.with_entropy, ctx.compute = temperature, with_entropy, compute
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        """∂log p_t/∂z = onehot(t) − p, ∂H/∂z = −p(log p + H)."""
        hidden, weight, targets, log_z, entropy = ctx.saved_tensors
        compute, precise = ctx.compute, log_z.dtype
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=precise) if needs_weight else None
        matrix = weight.to(compute)
        for rows in _chunks(len(hidden), len(weight)):
            h = hidden[rows].to(compute)
            log_p = (h @ matrix.T).to(precise).div_(ctx.temperature).sub_(log_z[rows, None])
            p = log_p.exp()
            if ctx.with_entropy:
                slope = log_p.add_(entropy[rows, None]).mul_(grad_entropy[rows, None]).add_(grad_logprobs[rows, None])
            else:
                slope = grad_logprobs[rows, None]
            grad_z = p.mul_(slope).neg_()
            grad_z.scatter_add_(-1, targets[rows, None], grad_logprobs[rows, None])
            grad_z = grad_z.div_(ctx.temperature).to(compute)
            if grad_hidden is not None:
                grad_hidden[rows] = (grad_z @ matrix).to(hidden.dtype)
            if grad_weight is not None:
                grad_weight += grad_z.T @ h
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None


def _chunks(num_rows: int, vocab_size: int) -> list[slice]:
    step = max(1, _CHUNK_ELEMENTS // vocab_size)
    return [slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]
