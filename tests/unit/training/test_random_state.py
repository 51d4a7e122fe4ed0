"""Draws go on where they were when the state was taken, after JSON and after a strategy's own files."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch

from turnwise.models.load import load_model
from turnwise.training.state import GlobalRandomState
from turnwise.training.torch_strategy import TorchStrategy


def draw():
    return random.random(), random.gauss(0, 1), np.random.normal(), torch.rand(2).tolist()


@pytest.mark.parametrize("how", ["json", "files"])
def test_draws_go_on(tiny_model, tmp_path, how):
    strategy = TorchStrategy(load_model(tiny_model))
    draw()
    kept = json.dumps(GlobalRandomState().state_dict())
    strategy.save(tmp_path)
    first = draw()
    if how == "json":
        GlobalRandomState().load_state_dict(json.loads(kept))
    else:
        strategy.load(tmp_path)
    assert draw() == first
