"""Training by DeepSpeed, which shards optimiser state, gradients and weights over the ranks (ZeRO)."""

import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from transformers import PreTrainedModel

from turnwise.errors import ConfigError, NotAvailableError, counted, install_hint
from turnwise.models.lora import Adapters
from turnwise.models.shares import MOMENTS, Shares
from turnwise.protocols import Loss, MemoryKind, Output, StepPart
from turnwise.runtime.info import StrategyInfo
from turnwise.runtime.rank import RankContext
from turnwise.runtime.stopwatch import TokenCounts
from turnwise.training.base import BaseStrategy, Update
from turnwise.training.deepspeed_group import join_role
from turnwise.training.model_source import ModelSource
from turnwise.training.moments import SavedMoments, Trained, trained_of
from turnwise.training.optimizer import build_optimizer, moment_numbers, set_learning_rate
from turnwise.training.settings import StrategySettings
from turnwise.training.state import copy_shares, write_trainer_state
from turnwise.training.transformers_model import TransformersModel
from turnwise.types import Batch, Metric, ModelOutputs

_DEFAULT_STAGE = 2
_SHARES_WEIGHTS = 3  # the stage
_SHARES = {1: "its state", 2: "its state and gradients", _SHARES_WEIGHTS: "its state, gradients and weights"}
"""ZeRO stage → what each rank keeps a share of."""
_PARTS: Mapping[MemoryKind, Sequence[str]] = {
    "weights": ["lp_params"],
    "optimizer": ["optim_states", "hp_params", "lp_grads"],
}
"""Kind of memory → DeepSpeed's names of its parts. DeepSpeed's fp32 copy of the weights and its gradients are
`optimizer`."""


class DeepSpeedStrategy(BaseStrategy):
    """Trains a policy or a value model on ranks that each keep a share of the optimiser state (ZeRO 1), also
    of the gradients (ZeRO 2), or also of the weights (ZeRO 3; Rajbhandari et al. 2020, arXiv:1910.02054).

    `options` is DeepSpeed's own config. DeepSpeed sums gradients over micro-batches and ranks, clips them,
    and updates its own copy of the weights. Schedule, loss scale, denominators and checkpoints are
    turnwise's. Checkpoints hold whole tensors, so a run can continue with another number of ranks, another
    stage, or `torch_train`.

    All ranks compute the same number of micro-batches, even those of weight 0, since ZeRO 3 gathers weights
    for each. A call of `train_step` only stores its part of an optimiser step; the call with the last part
    computes all. Raises NotAvailableError if DeepSpeed isn't installed; ConfigError if it refuses the
    options, or trains another role here that is on other devices too."""

    def __init__(
        self,
        model: PreTrainedModel,
        settings: StrategySettings,
        *,
        options: Mapping[str, Any],
        adapters: Adapters | None = None,
        rank: RankContext | None = None,
    ) -> None:
        assert settings.optimizer is not None, "DeepSpeed runs no frozen model"
        super().__init__(settings, rank)
        # The kernels read weights where they lie, and DeepSpeed moves them.
        self._model = TransformersModel(
            model.to(self.device), self.device, settings, adapters, uses_kernels=False
        )
        self.model = self._model.module
        self._ranks.copy_from_first(self.model.state_dict().values())
        self._adam = build_optimizer(self.model, settings.optimizer)
        # before parameters are shared out
        self._trained_parameters = trained_of(self.model.named_parameters())
        self._deepspeed = _import_deepspeed(self.device)
        join_role(self._deepspeed, self.device, self._context)
        peers = self._context.peers
        number = sorted(peers).index(peers[self._context.rank])
        self._moments = _Moments(self._adam, number, len(peers))
        self._whole_model = self._model.describe()  # before its parameters are shared out
        self._parts: list[_Part] = []
        zero = {"stage": _DEFAULT_STAGE, **options.get("zero_optimization", {})}
        self.stage = int(zero["stage"])
        if self.stage not in _SHARES:
            raise ConfigError(
                f"strategy_config.zero_optimization.stage: {zero['stage']!r} isn't 1, 2 or 3; 0 is "
                "torch_train"
            )
        self.engine = self._make_engine({**options, "zero_optimization": zero})
        self._moments.begin(self.engine.optimizer, self._deepspeed, self.stage)
        self.model.eval()

    @classmethod
    def for_role(
        cls,
        source: ModelSource,
        rank: RankContext,
        options: Mapping[str, Any],
        settings: StrategySettings,
    ) -> Self:
        model = source.load(rank)
        adapters = source.prepare(model, rank)
        return cls(model, settings, options=options, adapters=adapters, rank=rank)

    def _make_engine(self, options: Mapping[str, Any]) -> Any:
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": self.settings.max_grad_norm or 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": None,
            **options,
        }
        module = _Forward(self._model)
        try:
            # DeepSpeed prints what it compiles, and a command's standard output is its answer.
            with redirect_stdout(sys.stderr):
                engine, *_ = self._deepspeed.initialize(
                    model=module,
                    optimizer=self._adam,
                    config=config,
                    dist_init_required=False,
                )
        except (ValueError, AssertionError, TypeError) as error:
            text = " ".join(str(error).split())
            raise ConfigError(
                f"strategy_args.strategy_config: DeepSpeed {self._deepspeed.__version__} says: {text}"
            ) from error
        return engine

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._model.weights(self._whole)

    def _compute(self, batch: Batch, outputs: frozenset[Output]) -> ModelOutputs:
        return ModelOutputs(**self.engine(batch=batch, outputs=outputs))

    def _base_model(self) -> AbstractContextManager[None]:
        return self._model.without_adapters()

    def _take_counts(self) -> TokenCounts:
        return self._model.take_counts()

    def _discard_gradients(self) -> None:
        self._parts = []

    def _add_gradients(
        self,
        micro_batches: Sequence[Batch],
        loss: Loss,
        position: float,
        part: StepPart,
    ) -> list[Metric]:
        self._parts.append(_Part(part.number, micro_batches, loss))
        if part.divisor is None:
            return []
        # DeepSpeed takes the mean over the ranks.
        scale = self._context.world_size / part.divisor
        self.engine.optimizer.loss_scale = self._loss_scale.factor
        num_left = sum(len(stored.micro_batches) for stored in self._parts)
        metrics: list[Metric] = []
        for stored in self._parts:
            with self._model.dropping(position, stored.number, self._context.rank):
                for batch in stored.micro_batches:
                    num_left -= 1
                    is_last = num_left == 0
                    self.engine.set_gradient_accumulation_boundary(is_last)
                    metrics += self._backward(batch, stored.loss, scale)
        self._parts = []
        return metrics

    def _backward(self, batch: Batch, loss: Loss, scale: float) -> list[Metric]:
        started = self._stopwatch.now()
        tensors = self._to_device(batch)
        metrics: list[Metric] = []
        with self._model.recomputing():
            outputs = self._compute(tensors, loss.outputs)
            if batch.weights.any():
                value, metrics = loss(outputs, tensors)
            else:
                value = 0.0 * sum(output.sum() for output in outputs.named().values())
            if not torch.isfinite(value.detach()):
                # The gradient may still be finite, and all ranks must skip the step.
                value = value * torch.nan
            self.engine.backward(value * scale)
        self._note("forward and backward", started, batch)
        return metrics

    def _finish_gradients(self) -> None:
        """Nothing: DeepSpeed has summed them over the ranks, and a loss that isn't finite has made them
        so."""

    def _make_update(self, learning_rate: float, divisor: float) -> Update:
        """The gradients are divided already: the divisor is in the scale of the losses."""
        set_learning_rate(self._adam, learning_rate)
        self._begin_update()
        self.engine.step()
        is_skipped = not self.engine.was_step_applied()
        return Update(float(self.engine.get_global_grad_norm()), is_skipped)

    def _whole(
        self, parameters: Sequence[Tensor], changing_rank: int | None = None
    ) -> AbstractContextManager[Any]:
        """Makes parameters whole in a context that all ranks must enter. On exit, all ranks get what
        `changing_rank` wrote."""
        if self.stage < _SHARES_WEIGHTS:
            return nullcontext()
        gathered: AbstractContextManager[Any] = self._deepspeed.zero.GatheredParameters(
            list(parameters), changing_rank
        )
        return gathered

    def _write_training(self, folder: Path, state: Mapping[str, Any], has_model: bool) -> None:
        """The weights are a plain folder in any case."""
        moments = self._moments.state_dict(is_kept=self._context.answers)
        self._write_model(folder)
        if self._context.answers:
            write_trainer_state(folder, state, moments)

    def _write_model(self, folder: Path) -> None:
        if self._model.adapters is not None:
            with self._whole(self._model.adapters.parameters):
                if self._context.answers:
                    self._model.write(folder)
            return
        weights: dict[str, Tensor] = {}
        for name, tensor in self.weights():
            if self._context.answers:
                weights[name] = tensor.cpu().clone()
        if self._context.answers:
            self._model.write(folder, weights)

    def _read_weights(self, folder: Path) -> None:
        self._model.read(folder, partial(self._whole, changing_rank=0))
        self.engine.optimizer.refresh_fp32_params()

    def _set_weights(self, shares: Shares) -> None:
        self._model.require_all_trained(shares.folder)
        copy_shares(shares, self.model, partial(self._whole, changing_rank=0))
        self.engine.optimizer.refresh_fp32_params()

    def _trained(self) -> Trained:
        return self._trained_parameters

    def _set_moments(self, saved: SavedMoments) -> None:
        self._moments.load(saved, list(moment_numbers(self._trained_parameters)))

    def _offload(self, kinds: frozenset[MemoryKind]) -> None:
        include: list[str] = []
        for kind in kinds:
            include += _PARTS.get(kind, ())
        self.engine.offload_states(include=include)

    def _onload(self, kinds: frozenset[MemoryKind]) -> None:
        """Brings back all that was offloaded, not only `kinds`, since DeepSpeed has no other call."""
        if kinds & _PARTS.keys():
            self.engine.reload_states()

    def _describe(self) -> StrategyInfo:
        return self._whole_model

    def _sharding(self) -> str:
        num_ranks = counted(self._context.world_size, "rank")
        return f"; DeepSpeed ZeRO {self.stage} shards {_SHARES[self.stage]} over {num_ranks}"


class _Part(NamedTuple):
    """A part of the current optimiser step that waits for the last one."""

    number: int
    micro_batches: Sequence[Batch]
    loss: Loss


class _Forward(nn.Module):
    """The module that the engine runs. DeepSpeed gathers the weights of a module before its call and releases
    them after."""

    def __init__(self, model: TransformersModel) -> None:
        super().__init__()
        self.model = model.module
        self._compute = model.compute

    def forward(self, batch: Batch, outputs: frozenset[Output]) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = self._compute(batch, outputs).named()
        return tensors


class _Moments:
    """Reads and writes AdamW's sharded moments as whole tensors, under the numbers that plain AdamW gives the
    parameters. `rank` is this process's of the `size` in DeepSpeed's group. All ranks must call its methods
    together. Make it before the engine, which removes the parameters from AdamW's groups."""

    def __init__(self, adam: AdamW, rank: int, size: int) -> None:
        self._adam = adam
        self._rank = rank
        self._size = size
        self._parameters: list[Tensor] = []
        for group in adam.param_groups:
            self._parameters += group["params"]
        self._shapes = [parameter.shape for parameter in self._parameters]
        self._groups = adam.state_dict()["param_groups"]

    def begin(self, optimizer: Any, deepspeed: ModuleType, stage: int) -> None:
        """Gives each partition of the weights the state that AdamW would make at its first step. DeepSpeed
        looks up the moments of all partitions as soon as the first parameter group has stepped, when the
        other groups would have none yet."""
        self._utils = deepspeed.utils
        self._stage = stage
        if stage == _SHARES_WEIGHTS:
            shares = optimizer.fp32_partitioned_groups_flat
        else:
            shares = optimizer.single_partition_of_fp32_groups
        for share in shares:
            step = torch.zeros((), device=share.device)
            moments = {name: torch.zeros_like(share) for name in MOMENTS}
            self._adam.state[share] = {"step": step, **moments}
        if stage < _SHARES_WEIGHTS:
            optimizer._lazy_init_hp_params_optimizer_state()

    def state_dict(self, is_kept: bool) -> dict[str, Any]:
        """The state as plain AdamW saves it, on the CPU. All ranks gather the moments; without `is_kept` none
        are returned."""
        state: dict[int, dict[str, Tensor]] = {}
        first = next(iter(self._adam.state.values()))
        step = first["step"].cpu()
        for number, parameter in enumerate(self._parameters):
            whole = {name: self._utils.safe_get_full_optimizer_state(parameter, name) for name in MOMENTS}
            if is_kept:
                moments = {name: moment.cpu().clone() for name, moment in whole.items()}
                state[number] = {"step": step.clone(), **moments}
        return {"state": state, "param_groups": self._groups}

    def load(self, saved: SavedMoments, names: Sequence[str]) -> None:
        """Sets the moments of the parameters, whose `names` are in the order of plain AdamW's numbers. A
        parameter that never had a gradient has none."""
        steps = [step for name in names if (step := saved.step(name)) is not None]
        step = max(steps, default=torch.zeros(()))
        for entry in self._adam.state.values():
            entry["step"].copy_(step)
        for name, parameter, shape in zip(names, self._parameters, self._shapes, strict=True):
            for moment in MOMENTS:
                value = torch.zeros(shape)
                if saved.step(name) is not None:
                    value = saved.whole(name, moment)
                self._set(parameter, value.to(parameter.device), moment)

    def _set(self, parameter: Any, value: Tensor, name: str) -> None:
        if self._stage < _SHARES_WEIGHTS:
            self._utils.safe_set_full_optimizer_state(parameter, value, name)
            return
        # DeepSpeed's own function fails if the ranks don't divide the number of elements: shares are padded
        # to equal sizes.
        size = parameter.ds_tensor.numel()
        padded = torch.zeros(size * self._size, device=value.device)
        padded[: value.numel()] = value.flatten()
        begin = self._rank * size
        share = padded[begin : begin + size]
        self._utils.safe_set_local_optimizer_state(parameter, share, name)


def _import_deepspeed(device: torch.device) -> ModuleType:
    """Imports DeepSpeed for this kind of device, which DeepSpeed reads from the environment when it is
    imported."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    try:
        with redirect_stdout(sys.stderr):
            import deepspeed
    except ImportError as error:
        raise NotAvailableError(
            f"deepspeed_train needs DeepSpeed, which isn't installed; {install_hint('deepspeed')}"
        ) from error
    # Its warnings go to the root logger's handlers instead of the standard output.
    logger = logging.getLogger("DeepSpeed")
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.WARNING)
    module: ModuleType = deepspeed
    return module
