"""Training and forward passes of a model in plain PyTorch, with the whole model on the device of each rank."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from turnwise.errors import ConfigError, NotAvailableError
from turnwise.models.forward import make_forward
from turnwise.models.loaded_model import dtype_name, loaded_model
from turnwise.models.lora import Adapters
from turnwise.protocols import WHOLE_STEP, Loss, MemoryKind, Output, StepPart
from turnwise.runtime.rank import RankContext
from turnwise.runtime.stopwatch import TokenCounts
from turnwise.runtime_info import StrategyInfo
from turnwise.training.optimizer import LossScale, LRSchedule, OptimizerSettings, build_optimizer, clip_gradients
from turnwise.training.ranks import Ranks
from turnwise.training.state import load_moments, load_state, save_state
from turnwise.types import Batch, Metric, ModelOutputs

logger = logging.getLogger(__name__)


class TorchStrategy:
    """Implements `protocols.TrainStrategy` for a policy, whose logits are divided by `temperature`, or for a value model.
    Without `optimizer` the model is frozen (`torch_infer`), as a reference is. With `adapters`, which `model` already contains,
    only they are trained and saved.

    The model's own dropout is always off, so that the new log-probs of the first update equal the old ones. Dropout of adapters
    is on in training passes. `dtype` is autocast's dtype; fp32 turns autocast off. With bf16 and fp16, matrix products run in
    that dtype, and master weights stay fp32. fp16 also scales the loss, so that small gradients don't underflow. Parameters are
    only changed in place, so an engine may read them, and they may be views of a larger tensor.

    `rank` names the device and the other ranks. Each rank gets a share of the micro-batches. Gradients are summed over the
    ranks before an optimiser step, so all ranks make the same step. Raises ConfigError if trained weights aren't fp32, or the
    architecture has no gradient checkpointing and `is_gradient_checkpointing` asks for it."""

    _uses_kernels: ClassVar[bool] = True  # whether the library's own kernels may read the weights where they lie

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        adapters: Adapters | None = None,
        optimizer: OptimizerSettings | None = None,
        temperature: float = 1.0,
        max_grad_norm: float | None = 1.0,
        dtype: torch.dtype = torch.float32,
        is_gradient_checkpointing: bool = False,
        rank: RankContext | None = None,
    ) -> None:
        self._ranks = Ranks(rank)
        self.device = torch.device(self._ranks.context.device)
        self.model = model.to(self.device).eval()
        self.dtype = dtype
        self.max_grad_norm = max_grad_norm
        self._adapters = adapters
        self._forward_pass = make_forward(self.model, temperature, self._uses_kernels)
        self._optimizer = self._schedule = None
        self._checkpointed: list[torch.nn.Module] = []
        self._has_skipped = False
        self._is_finite = True  # whether all losses of the current optimiser step so far are finite
        self._num_updates = 0
        self._stopwatch = self._ranks.context.stopwatch
        self._settings = optimizer
        if optimizer is None:
            self.model.requires_grad_(False)
        else:
            if self.model.dtype != torch.float32:
                raise ConfigError(
                    f"weights are {self.model.dtype}, but small updates vanish outside fp32; load them in float32"
                )
            self._ranks.copy_from_first(self.model.state_dict().values())
            self._optimizer = build_optimizer(self.model, optimizer)
            self._schedule = LRSchedule(optimizer)
            self._checkpointed = _checkpoint_layers(self.model) if is_gradient_checkpointing else []
        self._loss_scale = LossScale(is_on=optimizer is not None and dtype == torch.float16)

    def forward(
        self, batches: Sequence[Batch], outputs: frozenset[Output], without_adapter: bool = False
    ) -> list[dict[str, Any]]:
        """For each batch the outputs by name: float32 arrays [N], 0 outside the response mask. `without_adapter` uses the base
        model. Raises NotAvailableError if the model's head doesn't give an output, or there is no adapter to leave out."""
        if without_adapter and self._adapters is None:
            raise NotAvailableError("all parameters are trained, so there is no base model; set lora_rank, or load a reference")
        results: list[dict[str, Any]] = []
        for batch in batches:
            started = self._stopwatch.now()
            with torch.no_grad(), self._adapters.off() if without_adapter and self._adapters else nullcontext():
                tensors = self._run(self._to_device(batch), outputs)
            named = tensors.named().items()
            results.append({name: tensor.float().cpu().numpy() for name, tensor in named if name in outputs})
            self._note("forward", started, batch)
        self._count()
        return results

    def train_step(
        self, micro_batches: Sequence[Batch], loss: Loss, position: float = 0.0, part: StepPart = WHOLE_STEP
    ) -> list[Metric]:
        """Makes one optimiser step, or a `part` of one, and returns the loss's metrics. With the last part the first rank adds
        `grad_norm` (before clipping; not for a skipped step), `lr` and `skipped_steps`.

        If a loss or a gradient isn't finite, the step is skipped: weights and optimiser stay as they are. Raises
        NotAvailableError if the strategy has no optimiser."""
        if self._optimizer is None or self._schedule is None:
            raise NotAvailableError("a torch_infer strategy can't train; use strategy_name: torch_train")
        if part.number == 0:
            self._optimizer.zero_grad(set_to_none=True)
            self._is_finite = True
        metrics: list[Metric] = []
        seeds = (part.number, self._ranks.context.rank)
        with self._adapters.dropping(position, *seeds) if self._adapters else nullcontext():
            for batch in (batch for batch in micro_batches if batch.weights.any()):
                started = self._stopwatch.now()
                tensors = self._to_device(batch)
                with self._recomputing():
                    value, loss_metrics = loss(self._run(tensors, loss.outputs), tensors)
                    (value * self._loss_scale.factor).backward()
                self._is_finite = self._is_finite and bool(torch.isfinite(value.detach()))
                metrics.extend(loss_metrics)
                self._note("forward and backward", started, batch)
        self._count()
        if part.divisor is None:
            return metrics
        started = self._stopwatch.now()
        self._ranks.sum_gradients([parameter for parameter in self.model.parameters() if parameter.requires_grad])
        is_finite = self._ranks.all(self._is_finite, self.device)
        if not self._ranks.is_one:
            self._stopwatch.add("trainer", "sum over ranks", started)
            started = self._stopwatch.now()
        # Every rank has the same sum, so all ranks scale, skip and step in the same way.
        divisor = part.divisor * self._loss_scale.factor
        changing = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        if divisor != 1.0:
            for parameter in changing:
                assert parameter.grad is not None
                parameter.grad /= divisor
        grad_norm = clip_gradients(changing, self.max_grad_norm).item()
        learning_rate = self._schedule.apply(self._optimizer, position)
        is_skipped = not (is_finite and np.isfinite(grad_norm))
        self._num_updates += 1  # before the weights change: a second Ctrl-C may come in the middle of it
        if not is_skipped:
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return [*metrics, *self._noted_step(started, learning_rate, grad_norm, is_skipped)]

    def _noted_step(self, started: float, learning_rate: float, grad_norm: float, is_skipped: bool) -> list[Metric]:
        """Notes an optimiser step that was made or skipped; returns its metrics on the first rank, none on others."""
        if is_skipped and not self._has_skipped and self._loss_scale.is_lowest:
            self._has_skipped = True
            logger.warning(
                "an optimiser step was skipped: its loss or gradient isn't finite (gradient norm %s). "
                "Later ones are only counted, in skipped_steps",
                grad_norm,
            )
        self._loss_scale.update(is_skipped)
        self._stopwatch.add("trainer", "optimizer", started)
        if not self._ranks.context.answers:
            return []
        norms = [] if is_skipped else [Metric("grad_norm", grad_norm)]
        return [*norms, Metric("lr", learning_rate, "last"), Metric("skipped_steps", float(is_skipped), "sum")]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """`(Hugging Face name, tensor)` of every parameter, with adapters merged in. Tied parameters come once."""
        if self._adapters is not None:
            yield from self._adapters.merged_weights()
            return
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach()

    def save(self, folder: Path) -> None:
        """The first rank writes the model or its adapters, with optimiser and random states (see `save_state`)."""
        if self._ranks.context.answers:
            moments = None if self._optimizer is None else self._optimizer.state_dict()
            save_state(folder, self.model, moments, self._adapters, self._loss_scale, self.device)

    def load(self, folder: Path) -> None:
        """Continues from what `save` wrote, bit for bit. Raises ModelError if the folder holds no such state."""
        restore = None if self._optimizer is None else partial(load_moments, self._optimizer)
        load_state(folder, self.model, restore, self._adapters, self._loss_scale, self.device)

    def offload(self, kinds: Iterable[MemoryKind]) -> None:
        """Moves these kinds of memory (`weights`, `optimizer`) to the host; does nothing on a CPU."""
        self._move(kinds, torch.device("cpu"))

    def onload(self, kinds: Iterable[MemoryKind]) -> None:
        """Moves these kinds of memory back to the device. Weights that were views of a larger tensor aren't any more."""
        self._move(kinds, self.device)

    def info(self) -> StrategyInfo:
        clipping = "" if self.max_grad_norm is None else f", gradients clipped to norm {self.max_grad_norm:g}"
        return StrategyInfo(
            model=loaded_model(self.model),
            compute_dtype=dtype_name(self.dtype),
            optimizer="" if self._settings is None else self._settings.describe() + clipping,
            recomputes_activations=bool(self._checkpointed),
            adapters="" if self._adapters is None else self._adapters.describe(),
            saved_bytes=self._saved_bytes(),
            num_updates=self._num_updates,
        )

    def _saved_bytes(self) -> int:
        """Approximate bytes that `save` writes: the weights, or the adapters alone, and Adam's two moments if there are any."""
        tensors = list(self.model.parameters())
        trained = sum(tensor.nbytes for tensor in tensors if tensor.requires_grad)
        saved = trained if self._adapters else sum(tensor.nbytes for tensor in tensors)
        return saved + (2 * trained if self._optimizer is not None else 0)

    def _run(self, batch: Batch, outputs: frozenset[Output]) -> ModelOutputs:
        with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32):
            return self._forward_pass(batch, outputs)

    @contextmanager
    def _recomputing(self) -> Iterator[None]:
        """Turns gradient checkpointing on. transformers checkpoints a layer only while its `training` is set, and then uses no
        KV cache. An engine may sample from the same model between steps, so `training` is set only for forward and backward. It
        is set only on the layers: the modules inside them stay in evaluation mode, without dropout."""
        for layer in self._checkpointed:
            layer.training = True
        try:
            yield
        finally:
            for layer in self._checkpointed:
                layer.training = False

    def _count(self) -> None:
        """Reports to the stopwatch how many tokens passed through the model since the last report."""
        counts, self._forward_pass.counts = self._forward_pass.counts, TokenCounts()
        self._stopwatch.did_tokens(counts)

    def _note(self, name: str, started: float, batch: Batch) -> None:
        self._stopwatch.add("trainer", name, started, samples=len(batch.lengths), tokens=batch.num_tokens)
        self._stopwatch.did_batch(batch.num_tokens)

    def _to_device(self, batch: Batch) -> Batch:
        return batch.map(lambda array: torch.as_tensor(array, device=self.device))

    def _move(self, kinds: Iterable[MemoryKind], target: torch.device) -> None:
        if self.device.type == "cpu":
            return
        kinds = set(kinds)
        if "weights" in kinds:
            self.model.to(target)
        if "optimizer" in kinds and self._optimizer is not None:
            for state in self._optimizer.state.values():
                state.update({name: value.to(target) for name, value in state.items() if isinstance(value, Tensor)})
        torch.cuda.empty_cache()  # so that a server in another process can use the memory


def _checkpoint_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """Makes transformers keep only layers' inputs and recompute the rest in the backward pass. Returns these layers."""
    if not model.supports_gradient_checkpointing:
        raise ConfigError(f"{type(model).__name__} has no gradient checkpointing; set disable_gradient_checkpointing: true")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
