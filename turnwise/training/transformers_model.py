"""A model of transformers on one rank, as the strategies use it that don't build a model of their own."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from turnwise.costs.model import checkpoint_bytes
from turnwise.errors import ConfigError, ModelError, NotAvailableError
from turnwise.models.forward import PackedForward, make_forward
from turnwise.models.load import write_weights
from turnwise.models.loaded_model import dtype_name, loaded_model
from turnwise.models.lora import Adapters, Gathered
from turnwise.protocols import Output
from turnwise.runtime.info import StrategyInfo
from turnwise.runtime.stopwatch import TokenCounts
from turnwise.training.settings import StrategySettings
from turnwise.training.state import Copy, read_model_weights
from turnwise.types import Batch, ModelOutputs


def _call(make: Callable[[], PackedForward]) -> PackedForward:
    return make()


class TransformersModel:
    """A policy or a value model on its `device`; with `adapters`, which it already contains, only they are
    trained and saved.

    The model's own dropout is always off, so that the new log-probs of the first update equal the old ones.
    Dropout of adapters is on in training passes. `uses_kernels` lets turnwise's own kernels read the weights
    where they lie. `within` calls a function that computes with the model. Raises ConfigError if trained
    weights aren't fp32, or the architecture has no gradient checkpointing and the settings ask for it."""

    def __init__(
        self,
        model: PreTrainedModel,
        device: torch.device,
        settings: StrategySettings,
        adapters: Adapters | None = None,
        uses_kernels: bool = True,
        within: Callable[[Callable[[], PackedForward]], PackedForward] = _call,
    ) -> None:
        self.module = model.eval()
        self.adapters = adapters
        self._settings = settings
        self._device = device
        if settings.is_trained and self.module.dtype != torch.float32:
            raise ConfigError(
                f"weights are {self.module.dtype}, but small updates vanish outside fp32; load them in "
                "float32"
            )
        # Within it, an engine that shards may show parameters in the precision that it computes in.
        self._forward_pass = within(lambda: make_forward(self.module, settings.temperature, uses_kernels))
        self._checkpointed: list[nn.Module] = []
        if not settings.is_trained:
            self.module.requires_grad_(False)
            return
        if settings.is_gradient_checkpointing:
            self._checkpointed = _checkpoint_layers(self.module)

    def compute(self, batch: Batch, outputs: frozenset[Output]) -> ModelOutputs:
        """The outputs of a batch of tensors."""
        dtype = self._settings.dtype
        with torch.autocast(self._device.type, dtype=dtype, enabled=dtype != torch.float32):
            return self._forward_pass(batch, outputs)

    @property
    def trained_parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def take_counts(self) -> TokenCounts:
        """The tokens that passed through the model since the last call."""
        counts = self._forward_pass.counts
        self._forward_pass.counts = TokenCounts()
        return counts

    def without_adapters(self) -> AbstractContextManager[None]:
        """In this context the model is its base model. Raises NotAvailableError if there are no adapters to
        leave out."""
        if self.adapters is None:
            raise NotAvailableError(
                "all parameters are trained, so there is no base model; set lora_rank, or load a reference"
            )
        return self.adapters.off()

    def dropping(self, position: float, part: int, rank: int) -> AbstractContextManager[None]:
        """In this context the adapters' dropout is on (`Adapters.dropping`)."""
        if self.adapters is None:
            return nullcontext()
        return self.adapters.dropping(position, part, rank)

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Turns gradient checkpointing on. transformers checkpoints a layer only while its `training` is set,
        and then uses no KV cache. An engine may sample from the same model between steps, so `training` is
        set only for forward and backward. It is set only on the layers: the modules inside them stay in
        evaluation mode, without dropout."""
        for layer in self._checkpointed:
            layer.training = True
        try:
            yield
        finally:
            for layer in self._checkpointed:
                layer.training = False

    def weights(self, gathered: Gathered = nullcontext) -> Iterator[tuple[str, Tensor]]:
        """`(Hugging Face name, tensor)` of every parameter, with adapters merged in. Tied parameters come
        once. Each is read inside `gathered(…)`."""
        if self.adapters is not None:
            yield from self.adapters.merged_weights(gathered)
            return
        for name, parameter in self.module.named_parameters():
            with gathered([parameter]):
                yield name, parameter.detach()

    def shapes(self) -> Iterator[tuple[str, Tensor]]:
        """The names of `weights`, with tensors of which shapes and dtypes are right and values needn't be."""
        if self.adapters is not None:
            yield from self.adapters.base_parameters()
        else:
            yield from self.module.named_parameters()

    def write(self, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
        """Writes a Hugging Face folder, or only the adapters as a peft folder. `weights` replace the model's
        parameters if this process doesn't hold them whole. Raises OSError if the files can't be written."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.adapters is None:
            write_weights(self.module, folder, weights)
        else:
            self.adapters.save(folder)

    def read(self, folder: Path, gathered: Gathered = nullcontext, copy: Copy = Tensor.copy_) -> None:
        """Copies what `write` wrote into the live parameters, inside `gathered(…)`; those of a whole model by
        `copy`. Raises ModelError if it doesn't fit."""
        if self.adapters is None:
            read_model_weights(folder, self.module, gathered, copy)
            return
        with gathered(self.adapters.parameters):
            self.adapters.load(folder)

    def require_all_trained(self, folder: Path) -> None:
        """Raises ModelError if the checkpoint `folder`, which has all weights, can't continue adapters."""
        if self.adapters is not None:
            raise ModelError(
                f"{folder} holds all weights of a model, and this run trains LoRA adapters; remove lora_rank "
                "to continue with it, or start a new run from its weights with pretrain"
            )

    def describe(self) -> StrategyInfo:
        """The model and what is trained of it."""
        return StrategyInfo(
            model=loaded_model(self.module),
            compute_dtype=dtype_name(self._settings.dtype),
            recomputes_activations=bool(self._checkpointed),
            adapters="" if self.adapters is None else self.adapters.describe(),
            saved_bytes=self._saved_bytes(),
        )

    def _saved_bytes(self) -> int:
        """Approximate bytes that `write` writes, and Adam's two moments if it is trained."""
        num_trained = sum(tensor.nbytes for tensor in self.trained_parameters)
        num_saved = num_trained
        if not self.adapters:
            num_saved = sum(tensor.nbytes for tensor in self.module.parameters())
        # The parameters of a frozen model need no gradient, so that it has no moments.
        return checkpoint_bytes(num_saved, num_trained)


def _checkpoint_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Makes transformers keep only layers' inputs and recompute the rest in the backward pass. Returns these
    layers."""
    if not model.supports_gradient_checkpointing:
        raise ConfigError(
            f"{type(model).__name__} has no gradient checkpointing; set disable_gradient_checkpointing: true"
        )
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
