"""Log-probs and entropies of a vocabulary whose rows are divided among ranks (Megatron's tensor parallelism;
Shoeybi et al. 2019, arXiv:1909.08053). No logit leaves its rank."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from turnwise.models.logprobs import TokenLogprobs, chunks_of, of_rows

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
) -> TokenLogprobs:
    """What `token_logprobs` gives, where each rank has the rows [V / ranks, H] of `weight`. `hidden` [N, H]
    and `targets` [N] are the same on all ranks, as are the results [N] and the gradient of `hidden`.

    Ranks meet three times for each chunk of tokens: maximum of the logits; sums of exp z, of exp z · z and of
    the target's z; and in the backward pass the gradient of `hidden`.

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
        logprobs, entropy = _ShardedLogprobs.apply(
            hidden, weight, targets, shard, temperature, with_entropy, compute
        )
    return TokenLogprobs(full=logprobs, truncated=None, entropy=entropy if with_entropy else None)


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
        compute: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        precise = torch.promote_types(hidden.dtype, torch.float32)
        ctx.rows_of = _Rows(shard, len(weight), temperature, compute, precise)
        logprobs = hidden.new_zeros(len(hidden), dtype=precise)
        log_z = torch.zeros_like(logprobs)
        entropy = torch.zeros_like(logprobs)
        matrix = weight.to(compute)
        for rows in chunks_of(len(hidden), len(weight)):
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
        ctx.save_for_backward(hidden, weight, targets, log_z, entropy)
        ctx.with_entropy = with_entropy
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        """∂log p_t/∂z = onehot(t) − p, ∂H/∂z = −p(log p + H), on the columns of this rank."""
        hidden, weight, targets, log_z, entropy = ctx.saved_tensors
        rows_of: _Rows = ctx.rows_of
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=log_z.dtype)
        matrix = weight.to(rows_of.compute)
        for rows in chunks_of(len(hidden), len(weight)):
            z = rows_of.logits(hidden, matrix, rows)
            log_p = z.sub_(log_z[rows, None])
            p = log_p.exp()
            slope = grad_logprobs[rows, None]
            if ctx.with_entropy:
                slope = log_p.add_(entropy[rows, None]).mul_(grad_entropy[rows, None]).add_(slope)
            grad_z = p.mul_(slope).neg_()
            rows_of.add_to_targets(grad_z, targets[rows], grad_logprobs[rows])
            grad_z = grad_z.div_(of_rows(rows_of.temperature, rows)).to(rows_of.compute)
            grad_hidden[rows] = (grad_z @ matrix).to(hidden.dtype)
            grad_weight += grad_z.T @ hidden[rows].to(rows_of.compute)
        _reduce(rows_of.shard, grad_hidden, "sum")
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None


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

    def add_to_targets(self, z: Tensor, targets: Tensor, values: Tensor) -> None:
        """Adds the values to the columns of those targets that are on this rank."""
        columns, is_here = self._columns(targets)
        z.scatter_add_(-1, columns[:, None], values.where(is_here, 0.0)[:, None])

    def _columns(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        columns = targets - self.shard.first
        is_here = (columns >= 0) & (columns < self.num_columns)
        return columns.clamp(0, self.num_columns - 1), is_here


def _reduce(shard: VocabularyShard, tensor: Tensor, operation: Literal["max", "sum"]) -> None:
    if shard.reduce is not None:
        shard.reduce(tensor, operation)
