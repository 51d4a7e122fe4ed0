"""Training and forward passes of a model that Megatron divides among ranks: each layer among tensor-parallel
ranks, layers among pipeline stages, samples among copies of the model."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from turnwise.costs.model import checkpoint_bytes
from turnwise.errors import ModelError, NotAvailableError
from turnwise.models.loaded_model import dtype_name, loaded_model
from turnwise.models.shares import MOMENTS, Shares, moment_key
from turnwise.models.value_head import value_head
from turnwise.protocols import Loss, MemoryKind, Output, StepPart
from turnwise.runtime.info import StrategyInfo
from turnwise.runtime.rank import RankContext
from turnwise.runtime.stopwatch import TokenCounts
from turnwise.spec.megatron_options import MegatronOptions
from turnwise.training.base import BaseStrategy, Update
from turnwise.training.host_copies import HostCopies
from turnwise.training.megatron import groups
from turnwise.training.megatron.architecture import check_shape
from turnwise.training.megatron.bridge import Place, places_of, trained_places
from turnwise.training.megatron.comparison import reference_of, require_same_outputs
from turnwise.training.megatron.optimizer import MegatronAdam
from turnwise.training.megatron.parts import HeldParameters
from turnwise.training.megatron.schedule import run_pipeline
from turnwise.training.megatron.startup import Read, build_parts, open_model, require_kernels
from turnwise.training.model_source import ModelSource
from turnwise.training.moments import SavedMoments, Trained
from turnwise.training.settings import FROZEN, StrategySettings
from turnwise.training.share_writer import Block
from turnwise.training.shared_checkpoint import add_settings, add_weights, write_model, write_training
from turnwise.training.state import require_same_tensors
from turnwise.transfer.live import manifest_of
from turnwise.transfer.manifest import WeightManifest
from turnwise.types import Batch, Metric, ModelOutputs


class MegatronStrategy(BaseStrategy):
    """Trains a policy or a value model, or runs a frozen one, of which each rank holds a part (see
    `megatron.model.DecoderPart`).

    `model` is a Hugging Face model. If `read` gives its tensors by name, only its config, names and shapes
    are used. All ranks of a copy of the model get the same micro-batches, and compute those of
    weight 0 too. Each rank writes its share of a checkpoint, and a run can continue with other sizes or
    strategies. Raises
    ConfigError for options that Megatron doesn't know, sizes that don't divide the model, and architectures
    without a bridge; NotAvailableError on a GPU without TransformerEngine."""

    def __init__(
        self,
        model: PreTrainedModel,
        settings: StrategySettings = FROZEN,
        *,
        options: Mapping[str, Any],
        rank: RankContext | None = None,
        read: Read | None = None,
    ) -> None:
        super().__init__(settings, rank)
        self._options = MegatronOptions.of(options, self._context.world_size)
        require_kernels(self.device, self._options)
        groups.join(self._options, self._context)
        tensors = model.state_dict()
        self._layout = self._context.layout
        self._named = {name: p.to("meta") for name, p in model.named_parameters()}
        self._is_trained = {
            name: p.requires_grad and settings.is_trained for name, p in model.named_parameters()
        }
        self._is_value_model = value_head(model) is not None
        modules = build_parts(model, self._options, options, settings, self.device)
        self._places = places_of(model.config, self._named)
        shapes = {name: tensor.shape for name, tensor in self._named.items()}
        self._held = HeldParameters(modules, self._places, shapes)
        trained = trained_places(self._places, self._is_trained)
        for name, parameter in self._held.by_name.items():
            parameter.requires_grad_(name in trained)
        self.model = model.to("meta")
        self._modules = modules
        self._parts: Sequence[Any] = modules  # or Megatron's wrappers around them, which have other `buffers`
        self._optimizer: MegatronAdam | None = None
        self._held.fill(read or tensors.__getitem__)
        if settings.optimizer is not None:
            self._optimizer = MegatronAdam(
                modules, settings.optimizer, self._options.use_distributed_optimizer
            )
            self._parts = self._optimizer.parts
        self._is_finite = True  # whether all losses of the current optimiser step so far are finite
        self._counts = TokenCounts()
        self._host = HostCopies()

    @classmethod
    def for_role(
        cls,
        source: ModelSource,
        rank: RankContext,
        options: Mapping[str, Any],
        settings: StrategySettings,
    ) -> Self:
        if source.adapters is not None:
            raise NotAvailableError(
                "model_args.lora_rank: LoRA isn't in this version of megatron_train; use fsdp2_train, "
                "deepspeed_train or torch_train"
            )
        require_kernels(torch.device(rank.device), MegatronOptions.of(options, rank.world_size))
        opened = open_model(source, rank, settings.is_trained)
        check_shape(opened.model.config, options)
        # The strategy takes the model's buffers away, so transformers computes first.
        reference = reference_of(opened.model, opened.slices) if rank.answers else None
        strategy = cls(opened.model, settings, options=options, rank=rank, read=opened.read)
        strategy.require_same_outputs(reference)
        return strategy

    def require_same_outputs(self, reference: Tensor | None) -> None:
        """Raises ModelError on all ranks if the model doesn't compute what transformers computed, the
        `reference` on the rank that answers. All ranks must call this."""
        num_batches = 1
        if self._options.vp is not None:
            num_batches = self._round_size
        require_same_outputs(self._modules, num_batches, reference, self._context, self._ranks)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._held.whole(lambda parameter: parameter)

    def weight_manifest(self) -> WeightManifest:
        """The names, shapes and dtypes of `weights`, without gathering them."""
        names = [name for place in self._places if not place.is_copy for name in place.tensors]
        return manifest_of((name, self._named[name]) for name in names)

    # A forward pass

    def _compute(self, batch: Batch, outputs: frozenset[Output]) -> ModelOutputs:
        [computed] = self._computed([batch], outputs) or [{}]
        return ModelOutputs(**computed)

    def _forward(self, batches: Sequence[Batch], outputs: frozenset[Output]) -> list[dict[str, Any]]:
        """The results on the last stage; other ranks, whose answers nobody reads, have none."""
        tensors = [self._to_device(batch) for batch in batches]
        computed = self._computed(tensors, outputs)
        return [
            {name: tensor.float().cpu().numpy() for name, tensor in of_batch.items() if name in outputs}
            for of_batch in computed
        ]

    def _computed(self, batches: Sequence[Batch], outputs: frozenset[Output]) -> list[dict[str, Tensor]]:
        started = self._stopwatch.now()

        def keep(batch: Batch, computed: dict[str, Tensor]) -> tuple[Tensor, Any]:
            nonlocal started
            self._note_batch("forward", started, batch)
            started = self._stopwatch.now()
            return torch.zeros(()), computed

        with torch.no_grad(), self._autocast():
            padded = self._whole_rounds(batches)
            results = run_pipeline(self._parts, padded, outputs, keep, is_forward_only=True)
        return results[: len(batches)]

    def _base_model(self) -> AbstractContextManager[None]:
        raise NotAvailableError(
            "all parameters are trained, so there is no base model; load a reference instead"
        )

    def _take_counts(self) -> TokenCounts:
        counts = self._counts
        self._counts = TokenCounts()
        return counts

    def _note_batch(self, name: str, started: float, batch: Batch) -> None:
        """Counts a micro-batch once for all ranks that compute it together."""
        if self._layout.answers(self._context.rank):
            size = batch.num_tokens
            self._counts = self._counts.plus(TokenCounts(size, size, size))
            self._note(name, started, batch)

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = self.settings.dtype
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype != torch.float32)

    def _whole_rounds(self, batches: Sequence[Batch]) -> list[Batch]:
        """The batches, and as many of weight 0 as an interleaved schedule needs: its stages take turns in
        rounds of as many batches as there are stages, or as the options say."""
        if self._options.vp is None or not batches:
            return list(batches)
        num_missing = -len(batches) % self._round_size
        last = batches[-1]
        return [*batches, *[replace(last, weights=0 * last.weights)] * num_missing]

    @property
    def _round_size(self) -> int:
        """Number of batches in which the stages of an interleaved schedule take turns."""
        size: int = self._options.passed.get("microbatch_group_size_per_vp_stage", self._options.pp)
        return size

    # The parts of an optimiser step

    def _discard_gradients(self) -> None:
        self._adam.discard_gradients()
        self._is_finite = True

    def _add_gradients(
        self,
        micro_batches: Sequence[Batch],
        loss: Loss,
        position: float,
        part: StepPart,
    ) -> list[Metric]:
        if not micro_batches:
            return []
        tensors = [self._to_device(batch) for batch in micro_batches]
        judge = partial(self._judge, loss)
        self._set_training(self.settings.is_gradient_checkpointing or self._options.recomputes)
        try:
            with self._autocast():
                metrics = run_pipeline(
                    self._parts,
                    self._whole_rounds(tensors),
                    loss.outputs,
                    judge,
                )
        finally:
            self._set_training(False)
        return [metric for of_batch in metrics for metric in of_batch]

    def _judge(self, loss: Loss, batch: Batch, computed: dict[str, Tensor]) -> tuple[Tensor, list[Metric]]:
        started = self._stopwatch.now()
        outputs = ModelOutputs(**computed)
        metrics: list[Metric] = []
        if batch.weights.any():
            value, metrics = loss(outputs, batch)
        else:
            value = 0.0 * torch.as_tensor(sum(output.sum() for output in computed.values()))
        self._is_finite = self._is_finite and bool(torch.isfinite(value.detach()))
        self._note_batch("forward and backward", started, batch)
        return value * self._loss_scale.factor, metrics

    def _set_training(self, is_on: bool) -> None:
        """Megatron recomputes activations only in training mode. There is no dropout in it."""
        for part in self._parts:
            part.train(is_on)

    def _finish_gradients(self) -> None:
        started = self._stopwatch.now()
        self._adam.sum_gradients()
        self._is_finite = self._ranks.all(self._is_finite, self.device)
        self._stopwatch.add("trainer", "sum over ranks", started)

    def _make_update(self, learning_rate: float, divisor: float) -> Update:
        """Every rank has the same norm and flag, so all ranks clip, skip and step in the same way."""
        grad_norm = self._adam.divide(divisor * self._loss_scale.factor)
        is_skipped = not (self._is_finite and np.isfinite(grad_norm))
        max_norm = self.settings.max_grad_norm
        if max_norm is not None and not is_skipped:
            self._adam.clip(min(max_norm / (grad_norm + 1e-6), 1.0))
        self._begin_update()
        if not is_skipped:
            self._adam.step(learning_rate)
        self._adam.discard_gradients()
        return Update(grad_norm, is_skipped)

    @property
    def _adam(self) -> MegatronAdam:
        assert self._optimizer is not None, "a frozen model has no optimiser"
        return self._optimizer

    # Saving, loading, memory and description

    def _write_training(self, folder: Path, state: Mapping[str, Any], has_model: bool) -> None:
        blocks = itertools.chain(self._held.blocks(lambda parameter: parameter), self._moment_blocks())
        size = self._describe().saved_bytes
        write_training(
            folder,
            self._ranks,
            blocks,
            state,
            self._steps(),
            size,
            self.max_file_bytes,
        )
        add_settings(folder, self._ranks, self.model)
        if has_model:
            add_weights(folder, self._ranks, self.max_file_bytes)

    def _write_model(self, folder: Path) -> None:
        blocks = self._held.blocks(lambda parameter: parameter)
        write_model(folder, self._ranks, blocks, self.model, self.max_file_bytes)

    def _read_weights(self, folder: Path) -> None:
        source = ModelSource(str(folder), has_value_head=self._is_value_model)
        opened = open_model(source, RankContext(), is_trained=False)
        saved = {name: parameter.shape for name, parameter in opened.model.named_parameters()}
        for name, tensor in self._named.items():
            if saved.get(name) != tensor.shape:
                raise ModelError(
                    f"the saved model has no tensor {name} of shape {tuple(tensor.shape)}; it is another "
                    "architecture"
                )
        self._fill(opened.read)

    def _set_weights(self, shares: Shares) -> None:
        require_same_tensors(shares, self._named)
        self._fill(lambda name: shares.whole(name, self._named[name].shape))

    def _fill(self, read: Read) -> None:
        self._held.fill(read)
        if self._optimizer is not None:
            self._optimizer.refresh()

    def _trained(self) -> Trained:
        return [(name, self._named[name].shape) for name, flag in self._is_trained.items() if flag]

    def _moment_blocks(self) -> Iterator[Block]:
        if self._optimizer is None:
            return
        for moment in MOMENTS:
            value_of = partial(self._adam.whole_moment, name=moment)
            yield from self._held.blocks(value_of, partial(moment_key, moment), self._is_trained_place)

    def _steps(self) -> dict[str, float] | None:
        """How many steps AdamW has made of each parameter; None for a frozen model."""
        if self._optimizer is None:
            return None
        number = float(self._adam.num_steps)
        return {name: number for name, _ in self._trained()}

    def _set_moments(self, saved: SavedMoments) -> None:
        for moment in MOMENTS:

            def read(name: str, moment: str = moment) -> Tensor:
                if saved.step(name) is None:  # plain AdamW has none of what never had a gradient
                    return torch.zeros(self._named[name].shape)
                return saved.whole(name, moment)

            for parameter, values in self._held.parts_of(read):
                self._adam.set_moment(parameter, moment, values.to(self.device))
        steps = [step for name, _ in self._trained() if (step := saved.step(name)) is not None]
        self._adam.set_num_steps(max(steps, default=torch.zeros(())))

    def _is_trained_place(self, place: Place) -> bool:
        return all(self._is_trained[name] for name in place.tensors)

    def _offload(self, kinds: frozenset[MemoryKind]) -> None:
        if "weights" in kinds:
            self._host.offload("weights", self._weight_tensors())
        if "optimizer" in kinds and self._optimizer is not None:
            self._host.offload("optimizer", self._optimizer.tensors())
        torch.cuda.empty_cache()  # so that a server in another process can use the memory

    def _onload(self, kinds: frozenset[MemoryKind]) -> None:
        for kind in sorted(kinds):
            self._host.onload(kind)

    def _weight_tensors(self) -> Iterator[Tensor]:
        for part in self._modules:
            yield from part.parameters()
            yield from part.buffers()

    def _describe(self) -> StrategyInfo:
        described = loaded_model(self.model)
        sizes = [tensor.numel() * 4 for tensor in self._named.values()]
        trained = [tensor.numel() * 4 for name, tensor in self._named.items() if self._is_trained[name]]
        kernel = "TransformerEngine, packed" if self.device.type == "cuda" else "a dense mask, packed"
        address = (described.address[0], next(iter(self._held.by_name.values())).data_ptr())
        num_trainable = sum(trained) // 4
        return StrategyInfo(
            model=replace(
                described,
                num_trainable=num_trainable,
                attention=kernel,
                device=str(self.device),
                address=address,
            ),
            compute_dtype=dtype_name(self.settings.dtype),
            recomputes_activations=self.settings.is_gradient_checkpointing or self._options.recomputes,
            adapters="",
            saved_bytes=checkpoint_bytes(sum(sizes), sum(trained)),
        )

    def _sharding(self) -> str:
        sizes = f"tensor {self._layout.tp} × pipeline {self._layout.pp} × data {self._layout.dp} ranks"
        if self._layout.cp > 1:
            sizes = f"context {self._layout.cp} × {sizes}"
        sharding = f"; Megatron divides the model over {sizes}"
        num_copies = self._layout.dp * self._layout.cp
        if self._options.use_distributed_optimizer and num_copies > 1:
            sharding += f", moments over {num_copies}"
        return sharding
