"""Log-probs and entropies of tokens under softmax(logits / temperature), without keeping logits [N, V].
Forward and backward pass compute a chunk of rows at a time. The forward pass keeps a few numbers per row; the
backward pass recomputes logits."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_CHUNK_ELEMENTS = 2**25  # logits held at once (128 MiB in fp32)


class RaggedIds(NamedTuple):
    """The ids that N tokens were drawn from, concatenated: `ids` [K], `counts` [N]. Count 0 means the whole
    vocabulary."""

    ids: Tensor
    counts: Tensor

    @property
    def rows(self) -> Tensor:
        """int64 [K]: for each id, the index from 0 to N − 1 of the token that it belongs to."""
        return torch.repeat_interleave(self.counts)

    def logsumexp(self, z: Tensor) -> Tensor:
        """log Σ exp z over the kept ids of each row of `z` [N, V]; meaningless in rows without kept ids.
        Differentiable."""
        return self.logsumexp_of(z[self.rows, self.ids])

    def logsumexp_of(self, logits: Tensor) -> Tensor:
        """`logsumexp`, given the logits [K] of the kept ids."""
        rows = self.rows
        zeros = logits.new_zeros(len(self.counts))
        top = zeros.scatter_reduce(0, rows, logits.detach(), "amax", include_self=False)
        total = zeros.index_add(0, rows, torch.exp(logits - top[rows]))
        bounded = total.clamp(min=torch.finfo(logits.dtype).tiny)
        return top + bounded.log()

    def cut(self, chunks: Sequence[slice]) -> "list[RaggedIds]":
        """Splits the kept ids into those of consecutive chunks of rows."""
        counts = [self.counts[rows] for rows in chunks]
        ids = self.ids.split([int(part.sum()) for part in counts])
        return [RaggedIds(*part) for part in zip(ids, counts, strict=True)]


class TokenLogprobs(NamedTuple):
    """Results for N tokens: log-probs over the whole vocabulary and over the kept ids, and entropies; None if
    not requested."""

    full: Tensor
    truncated: Tensor | None
    entropy: Tensor | None


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float | Tensor = 1.0,
    with_entropy: bool = False,
    kept_ids: RaggedIds | None = None,
) -> TokenLogprobs:
    """Log-probs [N] of `targets` [N], and entropies [N] in nats of the whole distribution, at hidden states
    [N, H].

    With z = hidden · weightᵀ / temperature, weight [V, H]: log p = z_target − logsumexp z, entropy = −Σ p log
    p. The product runs in autocast's dtype where autocast is on, everything after it in fp32 (or fp64). For
    log-probs over the `kept_ids`, logsumexp runs over those ids only. All results are differentiable. The
    temperature is one number, or one per token [N].

    >>> hidden, weight = torch.zeros(1, 2), torch.ones(4, 2)
    >>> logprobs, _, entropy = token_logprobs(hidden, weight, torch.tensor([3]), with_entropy=True)
    >>> logprobs.exp().item(), round(entropy.exp().item(), 4)
    (0.25, 4.0)
    """
    device_type = hidden.device.type
    compute = hidden.dtype
    if torch.is_autocast_enabled(device_type):
        compute = torch.get_autocast_dtype(device_type)
    with torch.autocast(device_type, enabled=False):
        full, truncated, entropy = _TokenLogprobs.apply(
            hidden,
            weight,
            targets,
            temperature,
            with_entropy,
            kept_ids,
            compute,
        )
    return TokenLogprobs(
        full=full,
        truncated=None if kept_ids is None else torch.where(kept_ids.counts > 0, truncated, full),
        entropy=entropy if with_entropy else None,
    )


def logprobs_of(
    logits: Tensor,
    targets: Tensor,
    temperature: float | Tensor,
    with_entropy: bool = False,
    kept_ids: RaggedIds | None = None,
) -> TokenLogprobs:
    """The results of `token_logprobs`, computed from given logits [N, V], which aren't yet divided by the
    temperature."""
    z = logits.float() / of_rows(temperature)
    log_p = torch.log_softmax(z, -1)
    full = log_p.gather(-1, targets[:, None]).squeeze(-1)
    z_target = z.gather(-1, targets[:, None]).squeeze(-1)
    entropy = None
    if with_entropy:
        entropy = -(log_p.exp() * log_p).sum(-1)
    if kept_ids is None:
        return TokenLogprobs(full, None, entropy)
    over_kept_ids = z_target - kept_ids.logsumexp(z)
    truncated = torch.where(kept_ids.counts > 0, over_kept_ids, full)
    return TokenLogprobs(full, truncated, entropy)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float | Tensor,
        with_entropy: bool,
        kept_ids: RaggedIds | None,
        compute: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:
        precise = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = hidden.new_zeros(len(hidden), dtype=precise)
        log_z = torch.zeros_like(logprobs)
        entropy = torch.zeros_like(logprobs)
        num_truncated = 0 if kept_ids is None else len(hidden)
        truncated = hidden.new_zeros(num_truncated, dtype=precise)
        log_z_truncated = torch.zeros_like(truncated)
        matrix = weight.to(compute)
        chunks = chunks_of(len(hidden), len(weight))
        kept_parts = [None] * len(chunks) if kept_ids is None else kept_ids.cut(chunks)
        for rows, part in zip(chunks, kept_parts, strict=True):
            z = hidden[rows].to(compute) @ matrix.T
            z = z.to(precise).div_(of_rows(temperature, rows))
            log_z[rows] = torch.logsumexp(z, -1)
            z_target = z.gather(-1, targets[rows, None]).squeeze(-1)
            logprobs[rows] = z_target - log_z[rows]
            if part is not None:
                log_z_truncated[rows] = part.logsumexp(z)
                truncated[rows] = z_target - log_z_truncated[rows]
            if with_entropy:
                # No name for the product: it would live on beside the next chunk's logits.
                entropy[rows] = log_z[rows] - torch.exp(z - log_z[rows, None]).mul_(z).sum(-1)
        ctx.save_for_backward(hidden, weight, targets, log_z, entropy, log_z_truncated)
        ctx.temperature = temperature
        ctx.with_entropy = with_entropy
        ctx.compute = compute
        ctx.kept_parts = kept_parts
        return logprobs, truncated, entropy

    @staticmethod
    def backward(
        ctx: Any,
        grad_logprobs: Tensor,
        grad_truncated: Tensor,
        grad_entropy: Tensor,
    ) -> tuple[Tensor | None, ...]:
        """∂log p_t/∂z = onehot(t) − p, ∂H/∂z = −p(log p + H). For kept ids: onehot(t) − q, where q is their
        softmax."""
        hidden, weight, targets, log_z, entropy, log_z_truncated = ctx.saved_tensors
        compute = ctx.compute
        precise = log_z.dtype
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=precise) if needs_weight else None
        matrix = weight.to(compute)
        chunks = chunks_of(len(hidden), len(weight))
        for rows, part in zip(chunks, ctx.kept_parts, strict=True):
            temperature = of_rows(ctx.temperature, rows)
            h = hidden[rows].to(compute)
            z = h @ matrix.T
            z = z.to(precise).div_(temperature)
            if part is not None:
                row = part.rows
                grad_part = grad_truncated[rows]
                log_q = z[row, part.ids] - log_z_truncated[rows][row]
                slope_truncated = torch.exp(log_q).mul_(grad_part[row])
            log_p = z.sub_(log_z[rows, None])
            p = log_p.exp()
            slope = grad_logprobs[rows, None]
            if ctx.with_entropy:
                negative_surplus = log_p.add_(entropy[rows, None])
                slope = negative_surplus.mul_(grad_entropy[rows, None]).add_(slope)
            grad_z = p.mul_(slope).neg_()
            grad_z.scatter_add_(-1, targets[rows, None], grad_logprobs[rows, None])
            if part is not None:
                grad_z.scatter_add_(-1, targets[rows, None], grad_part[:, None])
                grad_z.index_put_((row, part.ids), -slope_truncated, accumulate=True)
            grad_z = grad_z.div_(temperature).to(compute)
            if grad_hidden is not None:
                grad_hidden[rows] = (grad_z @ matrix).to(hidden.dtype)
            if grad_weight is not None:
                grad_weight += grad_z.T @ h
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return (grad_hidden, grad_weight, None, None, None, None, None)


def of_rows(temperature: float | Tensor, rows: slice = slice(None)) -> float | Tensor:
    if isinstance(temperature, Tensor):
        return temperature[rows, None]
    return temperature


def chunks_of(num_rows: int, vocab_size: int) -> list[slice]:
    step = max(1, _CHUNK_ELEMENTS // vocab_size)
    starts = range(0, num_rows, step)
    return [slice(start, min(start + step, num_rows)) for start in starts]
