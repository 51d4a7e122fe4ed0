"""A model of plain tensors whose tokens are shared by context-parallel ranks."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from toy_model import VOCAB_SIZE, toy_batches, toy_samples

from turnwise.runtime.rank import RankContext
from turnwise.training.megatron.context import Add, TokenShare, whole
from turnwise.types import Batch


def context_batch() -> Batch:
    [batch] = toy_batches(toy_samples(5))
    return batch.map(torch.as_tensor)


class ContextModel:
    """Stands for a decoder: a token's state depends on it and its position alone."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.embedding = torch.randn(VOCAB_SIZE, 8, generator=generator).requires_grad_()
        self.head = torch.randn(VOCAB_SIZE, 8, generator=generator).requires_grad_()

    def logprobs(self, share: TokenShare, batch: Batch) -> Tensor:
        """[N], 0 at the tokens of other ranks."""
        states = self.embedding[share.token_ids] * torch.cos(share.position_ids.float())[:, None]
        trained = batch.response_mask.nonzero().squeeze(-1)
        chosen, places = share.held(trained - 1, batch.num_tokens)
        trained = trained[chosen]
        rows = (states[places] @ self.head.T).log_softmax(-1)
        values = rows.gather(-1, batch.token_ids[trained][:, None]).squeeze(-1)
        return values.new_zeros(batch.num_tokens).index_copy(0, trained, values)

    def computed(self, share: TokenShare, add: Add | None) -> tuple[np.ndarray, list[Tensor]]:
        """Log-probs of all tokens, and this rank's gradients of a loss that isn't a sum over tokens: each
        one's gradient depends on the others."""
        batch = context_batch()
        logprobs = whole(self.logprobs(share, batch), add)
        loss = logprobs.sum().exp().log1p() + logprobs.square().sum().sqrt()
        gradients = torch.autograd.grad(loss, [self.embedding, self.head])
        return logprobs.detach().numpy(), list(gradients)


class ContextRank:
    """One of the processes that share the tokens."""

    def __init__(self, rank: RankContext) -> None:
        self.share = TokenShare.of(context_batch(), rank.world_size, rank.rank)

    def computed(self) -> tuple[np.ndarray, list[np.ndarray]]:
        """Log-probs, and gradients that are summed over the ranks, as Megatron does."""
        logprobs, gradients = ContextModel().computed(self.share, dist.all_reduce)
        for gradient in gradients:
            dist.all_reduce(gradient)
        return logprobs, [gradient.numpy() for gradient in gradients]
