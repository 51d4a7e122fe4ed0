"""Loads a policy for a server in this process, and defines the base class of such servers."""

import asyncio
from collections.abc import Iterable
from functools import cache
from typing import Any, Self

from transformers import PreTrainedModel

from turnwise.chat.codec import TextCodec
from turnwise.errors import NotAvailableError
from turnwise.inference.request import Decode
from turnwise.models.fused import load_fused
from turnwise.models.load import load_tokenizer, parse_dtype
from turnwise.models.loaded_model import loaded_model
from turnwise.protocols import MemoryKind, WeightSource
from turnwise.runtime.info import EVERY_SUSPENSION, PolicyInfo, ServerInfo
from turnwise.runtime.rank import RankContext
from turnwise.transfer.manifest import WeightManifest
from turnwise.transfer.receiver import copy_into, manifest_of_model


class HoldsModel:
    """Base of servers whose model is in their own process. If `reads_trainer`, the model is the trainer's
    own."""

    name: str
    """The server's name in error messages."""
    model: PreTrainedModel
    reads_trainer: bool

    @classmethod
    def for_policy(cls, rank: RankContext, policy: PolicyInfo, **options: Any) -> Self:
        """A `protocols.ServerFactory`. The server shares the model of a trainer in this process if the
        model's dtype is `policy.dtype`; otherwise it loads the policy."""
        dtype = parse_dtype(policy.dtype)
        trainer = rank.neighbours.get("actor_train")
        model: PreTrainedModel | None = None
        if trainer is not None and trainer.model.dtype == dtype:
            model = trainer.model
        reads_trainer = model is not None
        if model is None:
            model = load_fused(
                policy.path,
                dtype=dtype,
                device=rank.device,
                attn_implementation=policy.attention,
                trust=policy.trust,
            )
        return cls(
            model,
            reads_trainer=reads_trainer,
            max_length=policy.max_context,
            decode=decoder(policy),
            stopwatch=rank.stopwatch,
            **options,
        )  # type: ignore[call-arg]

    async def begin_update(self, manifest: WeightManifest) -> None:
        """See `InferenceServer`."""
        manifest.check_fits(manifest_of_model(self.model), self.name)

    async def receive(self, weights: WeightSource) -> int:
        """Copies tensors into the model and returns their number of bytes. The event loop runs meanwhile."""
        return await asyncio.to_thread(copy_into, self.model, weights)

    async def sleep(self, kinds: Iterable[MemoryKind]) -> None:
        """Does nothing. Raises NotAvailableError for any kind but `kv_cache`."""
        refused = set(kinds) - {"kv_cache"}
        if refused:
            raise NotAvailableError(
                "a server in the trainer's process can free its kv_cache only, got "
                f"{', '.join(sorted(refused))}; weights are the trainer's"
            )

    async def wake(self, kinds: Iterable[MemoryKind]) -> None:
        """Does nothing: the next request allocates the cache again. Raises NotAvailableError for any kind but
        `kv_cache`."""
        await HoldsModel.sleep(self, kinds)

    def describe(self, engine: str, **fields: Any) -> ServerInfo:
        """The server's info; `fields` are further fields of `ServerInfo`."""
        return ServerInfo(
            loaded_model(self.model),
            engine,
            needs_weights=not self.reads_trainer,
            sampling_mask=True,
            weight_versions=True,
            suspensions=EVERY_SUSPENSION,
            **fields,
        )


def decoder(policy: PolicyInfo) -> Decode:
    """A function that turns ids into text, special tokens included, since a stop string may be one, such as
    `</search>`. Its first call loads the tokenizer."""
    codec = cache(lambda: TextCodec(load_tokenizer(policy.path, policy.trust)))
    return lambda token_ids: codec().decode(token_ids, skips_special=False)
