"""Two processes that share the tokens of each sample compute what one does."""

from __future__ import annotations

import numpy as np
import pytest
from context_model import ContextModel, ContextRank, context_batch
from ranked_roles import cluster_of, runner  # noqa: F401

from turnwise.runtime.stopwatch import Stopwatch
from turnwise.training.megatron.context import TokenShare

pytestmark = pytest.mark.extra


def test_two_context_ranks_compute_what_one_does(runner):  # noqa: F811
    expected, gradients = ContextModel().computed(TokenShare.of(context_batch()), None)
    cluster = cluster_of(runner, {"actor_train": [0, 1]}, Stopwatch())
    try:
        workers = cluster.spawn("actor_train", ContextRank)
        logprobs, summed = workers.call("computed", route="broadcast").result()
    finally:
        cluster.shutdown()
    np.testing.assert_allclose(logprobs, expected, rtol=1e-6, atol=1e-6)
    for mine, gradient in zip(summed, gradients, strict=True):
        np.testing.assert_allclose(mine, gradient, rtol=1e-5, atol=1e-6)
