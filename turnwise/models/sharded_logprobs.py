"""Log-probs and entropies of a vocabulary whose rows are divided among ranks (Megatron's tensor parallelism;
Shoeybi et al. 2019, arXiv:1909.08053). No logit leaves its rank."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from turnwise.models.logprobs import RaggedIds, TokenLogprobs, chunks_of, of_rows

Reduce = Callable[[Tensor, Literal["max", "sum"]], None]
"""Replaces a tensor by the maximum or the sum of those of all ranks."""


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """The rows of the output embedding that this rank holds."""

    first: int
    """The token id of its first row."""
    vocab_size: int
    """Number of token ids on all ranks; rows from there on are padding."""
    reduce: Reduce | None = None
    """None if this rank holds all rows."""


def sharded_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    shard: VocabularyShard,
    temperature: float | Tensor = 1.0,
    with_entropy: bool = False,
    kept_ids: RaggedIds | None = None,
) -> TokenLogprobs:
    """What `token_logprobs` gives, where each rank has the rows [V / ranks, H] of `weight`. `hidden` [N, H]
    and `targets` [N] are the same on all ranks, as are the results [N] and the gradient of `hidden`.

    Ranks meet three times for each chunk of tokens: maximum of the logits; sums of exp z, of exp z · z and of
    the target's z; and in the backward pass the gradient of `hidden`. With `kept_ids` they also meet for the
    logits of these.

    >>> hidden, weight = torch.zeros(1, 2), torch.ones(4, 2)
    >>> result = sharded_logprobs(hidden, weight, torch.tensor([3]), VocabularyShard(0, 4))
    >>> result.full.exp().item()
    0.25
    """
    device_type = hidden.device.type
    compute = hidden.dtype
    if torch.is_autocast_enabled(device_type):
        compute = torch.get_autocast_dtype(device_type)
    with torch.autocast(device_type, enabled=False):
        full, truncated, entropy = _ShardedLogprobs.apply(
            hidden, weight, targets, shard, temperature, with_entropy, kept_ids, compute
        )
    return TokenLogprobs(
        full=full,
        truncated=None if kept_ids is None else torch.where(kept_ids.counts > 0, truncated, full),
        entropy=entropy if with_entropy else None,
    )


class _ShardedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        shard: VocabularyShard,
        temperature: float | Tensor,
        with_entropy: bool,
        kept_ids: RaggedIds | None,
        compute: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:
        precise = torch.promote_types(hidden.dtype, torch.float32)
        ctx.rows_of = _Rows(shard, len(weight), temperature, compute, precise)
        logprobs = hidden.new_zeros(len(hidden), dtype=precise)
        log_z = torch.zeros_like(logprobs)
        entropy = torch.zeros_like(logprobs)
        truncated = torch.zeros_like(logprobs)
        log_z_truncated = torch.zeros_like(logprobs)
        matrix = weight.to(compute)
        chunks = chunks_of(len(hidden), len(weight))
        ctx.kept_parts = [None] * len(chunks) if kept_ids is None else kept_ids.cut(chunks)
        for rows, part in zip(chunks, ctx.kept_parts, strict=True):
            z = ctx.rows_of.logits(hidden, matrix, rows)
            largest = z.max(-1).values
            _reduce(shard, largest, "max")
            z_target = ctx.rows_of.of_targets(z, targets[rows])
            scaled = torch.exp(z - largest[:, None])
            sums = torch.stack([scaled.sum(-1), z_target, (scaled * z).sum(-1)])
            _reduce(shard, sums, "sum")
            total, z_target, weighted = sums
            log_z[rows] = largest + total.log()
            logprobs[rows] = z_target - log_z[rows]
            entropy[rows] = log_z[rows] - weighted / total
            if part is not None:
                logits = ctx.rows_of.of_kept(z, part)
                _reduce(shard, logits, "sum")
                log_z_truncated[rows] = part.logsumexp_of(logits)
                truncated[rows] = z_target - log_z_truncated[rows]
        ctx.save_for_backward(hidden, weight, targets, log_z, entropy, log_z_truncated)
        ctx.with_entropy = with_entropy
        return logprobs, truncated, entropy

    @staticmethod
    def backward(
        ctx: Any,
        grad_logprobs: Tensor,
        grad_truncated: Tensor,
        grad_entropy: Tensor,
    ) -> tuple[Tensor | None, ...]:
        """On the columns of this rank: ∂log p_t/∂z = onehot(t) − p, ∂H/∂z = −p(log p + H), and for kept ids
        onehot(t) − q, where q is their softmax."""
        hidden, weight, targets, log_z, entropy, log_z_truncated = ctx.saved_tensors
        rows_of: _Rows = ctx.rows_of
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=log_z.dtype)
        matrix = weight.to(rows_of.compute)
        chunks = chunks_of(len(hidden), len(weight))
        for rows, part in zip(chunks, ctx.kept_parts, strict=True):
            z = rows_of.logits(hidden, matrix, rows)
            slope_truncated = None
            if part is not None:
                log_q = rows_of.of_kept(z, part) - log_z_truncated[rows][part.rows]
                slope_truncated = log_q.exp() * grad_truncated[rows][part.rows]
            log_p = z.sub_(log_z[rows, None])
            p = log_p.exp()
            slope = grad_logprobs[rows, None]
            if ctx.with_entropy:
                slope = log_p.add_(entropy[rows, None]).mul_(grad_entropy[rows, None]).add_(slope)
            grad_z = p.mul_(slope).neg_()
            rows_of.add(grad_z, targets[rows], grad_logprobs[rows] + grad_truncated[rows])
            if part is not None and slope_truncated is not None:
                rows_of.add(grad_z, part.ids, -slope_truncated, part.rows)
            grad_z = grad_z.div_(of_rows(rows_of.temperature, rows)).to(rows_of.compute)
            grad_hidden[rows] = (grad_z @ matrix).to(hidden.dtype)
            grad_weight += grad_z.T @ hidden[rows].to(rows_of.compute)
        _reduce(rows_of.shard, grad_hidden, "sum")
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None, None


@dataclass(frozen=True, slots=True)
class _Rows:
    """The part [n, V / ranks] of the logits that this rank computes."""

    shard: VocabularyShard
    num_columns: int
    temperature: float | Tensor
    compute: torch.dtype
    precise: torch.dtype

    def logits(self, hidden: Tensor, matrix: Tensor, rows: slice) -> Tensor:
        """Logits divided by the temperature; the probability of padding is 0."""
        z = hidden[rows].to(self.compute) @ matrix.T
        z = z.to(self.precise).div_(of_rows(self.temperature, rows))
        num_real = max(self.shard.vocab_size - self.shard.first, 0)
        # Its exp is 0, and a product with a gradient still finite.
        z[:, num_real:] = -(torch.finfo(self.precise).max ** 0.5)
        return z

    def of_targets(self, z: Tensor, targets: Tensor) -> Tensor:
        """The logits of those targets that are on this rank, 0 for others."""
        columns, is_here = self._columns(targets)
        return z.gather(-1, columns[:, None]).squeeze(-1).where(is_here, 0.0)

    def of_kept(self, z: Tensor, kept: RaggedIds) -> Tensor:
        """[K], the logits of those kept ids that are on this rank, 0 for others."""
        columns, is_here = self._columns(kept.ids)
        return z[kept.rows, columns].where(is_here, 0.0)

    def add(self, z: Tensor, ids: Tensor, values: Tensor, rows: Tensor | None = None) -> None:
        """Adds the values to the columns of those ids that are on this rank; without `rows` there is one id
        for each row."""
        columns, is_here = self._columns(ids)
        if rows is None:
            rows = torch.arange(len(z), device=z.device)
        z.index_put_((rows, columns), values.where(is_here, 0.0), accumulate=True)

    def _columns(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        columns = targets - self.shard.first
        is_here = (columns >= 0) & (columns < self.num_columns)
        return columns.clamp(0, self.num_columns - 1), is_here


def _reduce(shard: VocabularyShard, tensor: Tensor, operation: Literal["max", "sum"]) -> None:
    if shard.reduce is not None:
        shard.reduce(tensor, operation)
