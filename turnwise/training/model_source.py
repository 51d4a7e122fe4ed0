"""Where the model of a role comes from, and what of it is trained. A strategy loads it in its own way."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from turnwise.errors import ConfigError
from turnwise.model_files.folder import NOTHING, Trust, base_of_adapter
from turnwise.model_files.hub import local_path
from turnwise.models.fused import load_fused
from turnwise.models.load import load_model, save_model
from turnwise.models.lora import Adapters, LoRASettings, freeze
from turnwise.models.slices import SlicedModel, open_slices
from turnwise.models.value_head import load_value_model, value_head
from turnwise.runtime.rank import RankContext

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NewAdapters:
    """LoRA adapters that are put onto a model. If its folder is itself an adapter, the first rank writes the
    plain model below them to `merged`, with `tokenizer`."""

    settings: LoRASettings
    merged: Path
    tokenizer: PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model folder or hub name, and how it is loaded and trained. Nothing is read before a method is
    called."""

    path: str
    attention: str = "auto"
    """The attention kernel, as in `model_args.attn_implementation`."""
    trust: Trust = field(default=NOTHING)
    has_value_head: bool = False
    """Whether it is a value model instead of a language model."""
    is_fused: bool = False
    """Whether projections lie together in memory, as an engine in the same process reads them."""
    frozen: tuple[str, ...] = ()
    """Parameters whose names start with one of these aren't trained."""
    adapters: NewAdapters | None = None
    """What is trained instead of the model's own parameters."""

    def load(self, rank: RankContext) -> PreTrainedModel:
        """The whole model with fp32 weights on the device of `rank`. Raises ModelError if its folder can't be
        used."""
        load: Callable[..., PreTrainedModel] = load_model
        if self.has_value_head:
            load = load_value_model
        elif self.is_fused:
            load = load_fused
        return load(
            self.path,
            device=rank.device,
            attn_implementation=self.attention,
            trust=self.trust,
        )

    def load_slices(self) -> SlicedModel | None:
        """The model without its weights, of which each rank reads its own slices; None if this folder's
        weights can only be loaded as a whole. Raises ModelError if the folder can't be used."""
        return open_slices(self.path, self.has_value_head, self.attention, self.trust)

    def prepare(self, model: PreTrainedModel, rank: RankContext, fingerprint: str = "") -> Adapters | None:
        """Freezes what isn't trained, and puts the adapters into the model, whose weights have the
        `fingerprint` if they aren't there yet. Returns them, or None without any. Raises ConfigError if
        nothing is left to train, or only what comes before a value head of zeros."""
        adapters = None
        if self.adapters is None:
            freeze(model, self.frozen)
        else:
            base = plain_base(
                self.path,
                model,
                self.adapters.tokenizer,
                self.adapters.merged,
                rank,
            )
            adapters = Adapters(
                model,
                self.adapters.settings,
                base,
                value_head(model),
                fingerprint,
            )
        self._check_head(model)
        return adapters

    def _check_head(self, model: PreTrainedModel) -> None:
        head = value_head(model)
        if head is None or head.weight.requires_grad:
            return
        if not head.weight.any():
            raise ConfigError(
                f"critic.model_args.freeze_module_prefix: {', '.join(self.frozen)} freeze the value head, "
                "which is 0 everywhere: all values would stay the same; remove it, or name a value model "
                "as reward_pretrain"
            )


def plain_base(
    path: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    merged: Path,
    rank: RankContext,
) -> str:
    """The plain model onto which peft puts new adapters: `path`, or the folder `merged` if `path` is an
    adapter.

    The first rank writes the `model` with that adapter merged to `merged`. The others only need the name:
    they have the model, and the first rank alone writes checkpoints. So no rank waits, and none writes into
    another's half-written folder."""
    if base_of_adapter(path) is None:
        folder = local_path(path)
        return str(folder.resolve()) if folder.is_dir() else path
    if rank.answers:
        if not merged.is_dir():
            save_model(model, tokenizer, merged)
        logger.info(
            "%s is an adapter: new adapters are put onto the merged model, which is in %s", path, merged
        )
    return str(merged)
