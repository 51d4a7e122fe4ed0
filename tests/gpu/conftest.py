"""The device under test: the first GPU, or the CPU at the same toy size, so that these tests can't rot where
there is no card.

`make gpu` sets TURNWISE_NEEDS_GPU: then a machine without a card fails with a sentence instead of testing its
CPU.
"""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    if os.environ.get("TURNWISE_NEEDS_GPU"):
        pytest.fail("torch sees no GPU: make gpu needs one, and a torch built for it", pytrace=False)
    return torch.device("cpu")
