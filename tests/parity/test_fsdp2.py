"""FSDP2 on two ranks makes the steps of plain torch on one: the same samples, dealt to two processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rank_workers import Kind, distance
from ranked_roles import STEPS, steps
from strategy_contract import VALUES, WeightedLoss
from toy_model import toy_samples

from turnwise.pipelines.model_role import ModelRole

EPS = 1e-4
"""Adam's ε. With the usual 1e-8 the first steps of parameters without a gradient follow the sign of rounding
errors."""
KINDS = {
    "tied": Kind(),
    "untied": Kind(config={"tie_word_embeddings": False}),
    "llama": Kind(config={"model_type": "llama"}),
    "value": Kind("value", outputs=VALUES),
    "lora": Kind(rank=4),
    "checkpointing": Kind(is_gradient_checkpointing=True),
    "clipped": Kind(max_grad_norm=0.1),
    "kept": Kind(fsdp2={"reshard_after_forward": False}),
    "freed": Kind(fsdp2={"reshard_after_forward": True}),
    "last": Kind(fsdp2={"sync_gradients": "last"}),
    "copies": Kind(fsdp2={"fsdp_size": 1}),
    "offloaded": Kind(fsdp2={"offload_policy": True}),
    "lora_checkpointing": Kind(rank=4, dropout=0.0, is_gradient_checkpointing=True),
    "fp32_by_name": Kind(fsdp2={"param_dtype": "fp32", "reduce_dtype": "float32"}),
}
SMOKE = "tied"


def marked(name: str) -> Any:
    marks = [] if name == SMOKE else [pytest.mark.extra]
    return pytest.param(KINDS[name], id=name, marks=marks)


def pair(make_role, kind: Kind) -> tuple[ModelRole, ModelRole]:
    """The kind in plain torch on one rank, and sharded on two."""
    one = replace(kind, fsdp2=None, eps=EPS)
    two = replace(kind, fsdp2=kind.fsdp2 or {}, eps=EPS)
    return make_role(one, 1), make_role(two, 2)


def ask(role: ModelRole, method: str, *arguments: Any) -> Any:
    """What the first rank answers where all are asked."""
    return role.workers.call(method, *arguments, route="broadcast").result()


def moved(role: ModelRole, start: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: value - start[name] for name, value in ask(role, "parameters").items()}


@pytest.mark.parametrize("kind", [marked(name) for name in KINDS])
def test_two_ranks_make_the_steps_of_plain_torch(make_role, kind):
    """Log-probs 1e-6 in the mean, gradients and their norm 1e-5, displacement after three steps 1e-3. AdamW
    hides a gradient of a wrong scale, so gradients are compared."""
    loss = WeightedLoss(outputs=kind.outputs)
    roles = pair(make_role, kind)
    starts = [ask(role, "parameters") for role in roles]
    np.testing.assert_equal(*starts)
    samples = toy_samples(11)
    for output in sorted(kind.outputs):
        alone, shared = (role.forward(samples, output) for role in roles)
        differences = np.concatenate([abs(a - b) for a, b in zip(alone, shared, strict=True)])
        assert differences.mean() <= 1e-6 and differences.max() <= 1e-4
    first = [steps(role, loss, 1)[0] for role in roles]
    assert distance(*(ask(role, "last_gradient") for role in roles)) <= 1e-5
    assert first[0].keys() == first[1].keys()
    for name in ("actor/loss", "actor_train/grad_norm", "actor/lr", "actor/skipped_steps"):
        np.testing.assert_allclose(first[1][name], first[0][name], rtol=1e-5)
    for role in roles:
        steps(role, loss, STEPS - 1)
    displaced = [moved(role, start) for role, start in zip(roles, starts, strict=True)]
    assert distance(*displaced) <= 1e-3
