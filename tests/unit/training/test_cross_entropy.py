from __future__ import annotations

import torch
from toy_model import toy_batches, toy_samples

from turnwise.training.cross_entropy import CrossEntropy
from turnwise.types import ModelOutputs


def test_it_is_the_weighted_mean_over_masked_tokens_and_adds_up_over_micro_batches() -> None:
    samples = toy_samples(3)
    logprobs = {
        i: -torch.rand(s.num_tokens, generator=torch.Generator().manual_seed(i))
        for i, s in enumerate(samples)
    }
    expected = -sum(
        s.weight * logprobs[i][torch.tensor(s.response_mask)].sum() for i, s in enumerate(samples)
    )
    expected = expected / sum(s.weight * s.num_trained for s in samples)
    for parts in ([[0, 1, 2]], [[1], [2, 0]]):
        total = torch.zeros(())
        for part, batch in zip(parts, toy_batches(samples, parts), strict=True):
            outputs = ModelOutputs(logprobs=torch.cat([logprobs[i] for i in part]))
            total += CrossEntropy()(outputs, batch.map(torch.as_tensor))[0]
        torch.testing.assert_close(total, expected)
