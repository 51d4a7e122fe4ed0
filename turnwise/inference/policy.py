"""What a server that runs in its own process loads of a policy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from transformers import PreTrainedModel

from turnwise.chat.codec import TextCodec
from turnwise.inference.embedded.engine import Decode
from turnwise.models.fused import load_fused
from turnwise.models.load import load_tokenizer, parse_dtype
from turnwise.runtime.rank import RankContext
from turnwise.runtime_info import PolicyInfo


def of_policy(rank: RankContext, policy: PolicyInfo) -> dict[str, Any]:
    """What a server of this process is made with."""
    model, reads_trainer = policy_model(rank, policy)
    return {
        "model": model,
        "max_length": policy.max_context,
        "decode": decoder(policy),
        "stopwatch": rank.stopwatch,
        "reads_trainer": reads_trainer,
    }


def policy_model(rank: RankContext, policy: PolicyInfo) -> tuple[PreTrainedModel, bool]:
    """The model that a server samples from, and whether it is that of a trainer among its neighbours: if the dtype fits."""
    dtype, trainer = parse_dtype(policy.dtype), rank.neighbours.get("actor_train")
    if trainer is not None and trainer.model.dtype == dtype:
        return trainer.model, True
    options = {"dtype": dtype, "device": rank.device, "attn_implementation": policy.attention, "trust": policy.trust}
    return load_fused(policy.path, **options), False


def decoder(policy: PolicyInfo) -> Decode:
    """Turns ids into text. The tokenizer is loaded when it is first needed, by a request with stop strings."""

    @cache
    def codec() -> TextCodec:
        return TextCodec(load_tokenizer(policy.path, policy.trust))

    def decode(token_ids: Sequence[int]) -> str:
        return codec().decode(token_ids)

    return decode
