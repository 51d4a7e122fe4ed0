"""Loads a policy for a server in this process. Also the common part of servers that hold a loaded model."""

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, Self

import torch
from transformers import PreTrainedModel

from turnwise.chat.codec import TextCodec
from turnwise.errors import ModelError, NotAvailableError
from turnwise.inference.embedded.engine import Decode
from turnwise.models.fused import load_fused
from turnwise.models.load import load_tokenizer, parse_dtype
from turnwise.models.runtime_info import loaded_model
from turnwise.protocols import MemoryKind, NamedTensors
from turnwise.runtime.rank import RankContext
from turnwise.runtime_info import EVERY_SUSPENSION, PolicyInfo, ServerInfo


class HoldsModel:
    """Base of servers that hold their model in this process. With `reads_trainer` it is the trainer's own model."""

    model: PreTrainedModel
    reads_trainer: bool

    @classmethod
    def for_policy(cls, rank: RankContext, policy: PolicyInfo, **options: Any) -> Self:
        """A `protocols.ServerFactory`. The server uses the model of a trainer in this process, or else loads one."""
        model, reads_trainer = policy_model(rank, policy)
        own = {"max_length": policy.max_context, "decode": decoder(policy), "stopwatch": rank.stopwatch}
        return cls(model, reads_trainer=reads_trainer, **own, **options)  # type: ignore[call-arg]

    async def receive(self, weights: NamedTensors) -> int:
        """Copies tensors into the model; returns their bytes. Raises ModelError if one doesn't fit the model or is missing."""
        targets = self.model.state_dict()
        written: set[int] = set()
        num_bytes = 0
        with torch.no_grad():
            for name, tensor in weights:
                if name not in targets or targets[name].shape != tensor.shape:
                    raise ModelError(f"the trainer's tensor {name} {tuple(tensor.shape)} doesn't fit the server's model")
                targets[name].copy_(tensor)
                written.add(targets[name].data_ptr())
                num_bytes += targets[name].nbytes
        missed = [name for name, tensor in targets.items() if tensor.data_ptr() not in written]
        if missed:
            raise ModelError(f"the trainer gave no values for {len(missed)} tensors of the server's model, such as {missed[0]}")
        return num_bytes

    async def sleep(self, kinds: Iterable[MemoryKind]) -> None:
        """Raises NotAvailableError if more than the cache is to be freed."""
        if others := sorted(set(kinds) - {"kv_cache"}):
            named = ", ".join(others)
            raise NotAvailableError(
                f"a server in the trainer's process can free its kv_cache only, got {named}; weights are the trainer's"
            )

    async def wake(self, kinds: Iterable[MemoryKind]) -> None:
        """Does nothing: the next request allocates the cache again."""
        await HoldsModel.sleep(self, kinds)

    def describe(self, engine: str, **facts: Any) -> ServerInfo:
        """The info of this server."""
        model, needs = loaded_model(self.model), not self.reads_trainer
        can: Any = {"sampling_mask": True, "weight_versions": True, "suspensions": EVERY_SUSPENSION}
        return ServerInfo(model=model, engine=engine, needs_weights=needs, **can, **facts)


def policy_model(rank: RankContext, policy: PolicyInfo) -> tuple[PreTrainedModel, bool]:
    """The model that a server samples from, and whether it is a trainer's: one in this process with the same dtype."""
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
