"""Training by DeepSpeed, which shards optimiser state, gradients and weights over the ranks (ZeRO)."""

import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW
from transformers import PreTrainedModel

from turnwise.errors import ConfigError, NotAvailableError, counted, install_hint
from turnwise.protocols import WHOLE_STEP, Loss, MemoryKind, Output, StepPart
from turnwise.runtime.rank import RankContext
from turnwise.runtime_info import StrategyInfo
from turnwise.training.state import load_state, save_state
from turnwise.training.torch_strategy import TorchStrategy
from turnwise.types import Batch, Metric, ModelOutputs

_DEFAULT_STAGE = 2
_PARTS: Mapping[MemoryKind, Sequence[str]] = {"weights": ["lp_params"], "optimizer": ["optim_states", "hp_params", "lp_grads"]}
"""Kind of memory → DeepSpeed's names of its parts. DeepSpeed's fp32 copy of the weights and its gradients are `optimizer`."""
_MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's names of its two moments


class DeepSpeedStrategy(TorchStrategy):
    """`TorchStrategy` on ranks that each keep a share of the optimiser state (ZeRO 1), also of the gradients (ZeRO 2), or also
    of the weights (ZeRO 3; Rajbhandari et al. 2020, arXiv:1910.02054).

    `options` is DeepSpeed's own config. DeepSpeed sums gradients over micro-batches and ranks, clips them, and updates its own
    copy of the weights. Schedule, loss scale, denominators and checkpoints are turnwise's. Checkpoints hold whole tensors, so a
    run can continue with another number of ranks, another stage, or `torch_train`.

    All ranks compute the same number of micro-batches, even those of weight 0, since ZeRO 3 gathers weights for each. A call of
    `train_step` only stores its part of an optimiser step; the call with the last part computes all. Raises NotAvailableError
    if DeepSpeed isn't installed; ConfigError if it refuses the options, or the role isn't on all processes of the run."""

    _uses_kernels = False

    def __init__(self, model: PreTrainedModel, *, options: Mapping[str, Any], **settings: Any) -> None:
        super().__init__(model, **settings)
        assert self._optimizer is not None, "nothing to shard"
        context = self._ranks.context
        self._deepspeed = _import_deepspeed(self.device)
        _join(self.device, context)
        self._moments = _Moments(self._optimizer)
        zero = {"stage": _DEFAULT_STAGE, **options.get("zero_optimization", {})}
        self.stage = int(zero["stage"])
        if self.stage not in (1, 2, 3):
            raise ConfigError(f"strategy_config.zero_optimization.stage: {zero['stage']!r} isn't 1, 2 or 3; 0 is torch_train")
        self._whole_info = super().info()
        self._parts: list[tuple[int, Sequence[Batch], Loss]] = []  # the parts of the current optimiser step
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": self.max_grad_norm or 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": None,
            **options,
            "zero_optimization": zero,
        }
        try:
            # DeepSpeed prints what it compiles, and a command's standard output is its answer.
            with redirect_stdout(sys.stderr):
                self.engine, *_ = self._deepspeed.initialize(
                    model=_Forward(self.model, super()._run), optimizer=self._optimizer, config=config, dist_init_required=False
                )
        except (ValueError, AssertionError, TypeError) as error:
            said = " ".join(str(error).split())
            raise ConfigError(f"strategy_args.strategy_config: DeepSpeed {self._deepspeed.__version__} says: {said}") from error
        self._moments.begin(self.engine.optimizer, self._deepspeed, self.stage)
        self.model.eval()

    def train_step(
        self, micro_batches: Sequence[Batch], loss: Loss, position: float = 0.0, part: StepPart = WHOLE_STEP
    ) -> list[Metric]:
        assert self._schedule is not None and self._optimizer is not None
        if part.number == 0:
            self._parts = []
        self._parts.append((part.number, micro_batches, loss))
        if part.divisor is None:
            return []
        # DeepSpeed takes the mean over the ranks.
        scale = self._ranks.context.world_size / part.divisor
        self.engine.optimizer.loss_scale = self._loss_scale.factor
        num_left, metrics = sum(len(batches) for _, batches, _ in self._parts), []
        for number, batches, loss_of_part in self._parts:
            seeds = (number, self._ranks.context.rank)
            with self._adapters.dropping(position, *seeds) if self._adapters else nullcontext():
                for batch in batches:
                    num_left -= 1
                    self.engine.set_gradient_accumulation_boundary(num_left == 0)
                    metrics += self._backward(batch, loss_of_part, scale)
        self._parts = []
        self._count()
        started = self._stopwatch.now()
        learning_rate = self._schedule.apply(self._optimizer, position)
        self._num_updates += 1  # before the weights change, as in TorchStrategy
        self.engine.step()
        is_skipped, grad_norm = not self.engine.was_step_applied(), float(self.engine.get_global_grad_norm())
        return [*metrics, *self._noted_step(started, learning_rate, grad_norm, is_skipped)]

    def _backward(self, batch: Batch, loss: Loss, scale: float) -> list[Metric]:
        started = self._stopwatch.now()
        tensors = self._to_device(batch)
        with self._recomputing():
            outputs = self._run(tensors, loss.outputs)
            metrics: list[Metric] = []
            if batch.weights.any():
                value, metrics = loss(outputs, tensors)
            else:
                value = 0.0 * sum(output.sum() for output in outputs.named().values())
            if not torch.isfinite(value.detach()):
                value = value * torch.nan  # the gradient may still be finite, and all ranks must skip the step
            self.engine.backward(value * scale)
        self._note("forward and backward", started, batch)
        return metrics

    def _run(self, batch: Batch, outputs: frozenset[Output]) -> ModelOutputs:
        return ModelOutputs(**self.engine(batch=batch, outputs=outputs))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        answers = self._ranks.context.answers
        if self.stage < 3 and not answers:
            return
        for name, tensor in self._adapters.merged_weights(self._whole) if self._adapters else self._own_weights():
            if answers:
                yield name, tensor

    def _own_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            with self._whole([parameter]):
                yield name, parameter.detach()

    def _whole(self, parameters: Sequence[Tensor], changing_rank: int | None = None) -> AbstractContextManager[Any]:
        """Makes parameters whole in a context that all ranks must enter. On exit, all ranks get what `changing_rank` wrote."""
        if self.stage < 3:
            return nullcontext()
        gathered: AbstractContextManager[Any] = self._deepspeed.zero.GatheredParameters(list(parameters), changing_rank)
        return gathered

    def save(self, folder: Path) -> None:
        moments = self._moments.state_dict(is_kept=self._ranks.context.answers)
        if self._adapters is not None:
            with self._whole(self._adapters.parameters):
                if self._ranks.context.answers:
                    save_state(folder, self.model, moments, self._adapters, self._loss_scale, self.device)
            return
        weights = {name: tensor.cpu().clone() for name, tensor in self.weights()}
        if self._ranks.context.answers:
            save_state(folder, self.model, moments, None, self._loss_scale, self.device, weights)

    def load(self, folder: Path) -> None:
        gathered = partial(self._whole, changing_rank=0)
        load_state(folder, self.model, self._moments.load, self._adapters, self._loss_scale, self.device, gathered)
        self.engine.optimizer.refresh_fp32_params()

    def offload(self, kinds: Iterable[MemoryKind]) -> None:
        if self.device.type != "cpu":
            self.engine.offload_states(include=[part for kind in kinds for part in _PARTS.get(kind, ())])

    def onload(self, kinds: Iterable[MemoryKind]) -> None:
        """Brings back all that was offloaded, not only `kinds`, since DeepSpeed has no other call."""
        if self.device.type != "cpu" and set(kinds) & _PARTS.keys():
            self.engine.reload_states()

    def info(self) -> StrategyInfo:
        shards = {1: "its state", 2: "its state and gradients", 3: "its state, gradients and weights"}[self.stage]
        sharding = f"; DeepSpeed ZeRO {self.stage} shards {shards} over {counted(self._ranks.context.world_size, 'rank')}"
        optimizer = self._whole_info.optimizer + sharding
        return replace(self._whole_info, optimizer=optimizer, num_updates=self._num_updates)


class _Forward(nn.Module):
    """The module that the engine runs. DeepSpeed gathers the weights of a module before its call and releases them after."""

    def __init__(self, model: PreTrainedModel, run: Any) -> None:
        super().__init__()
        self.model = model
        self._run = run

    def forward(self, batch: Batch, outputs: frozenset[Output]) -> dict[str, Tensor]:
        named: dict[str, Tensor] = self._run(batch, outputs).named()
        return named


class _Moments:
    """Reads and writes AdamW's sharded moments as whole tensors, under the numbers that plain AdamW gives the parameters. All
    ranks must call its methods together. Make it before the engine, which removes the parameters from AdamW's groups."""

    def __init__(self, adam: AdamW) -> None:
        self._adam = adam
        self._parameters: list[Tensor] = [parameter for group in adam.param_groups for parameter in group["params"]]
        self._shapes = [parameter.shape for parameter in self._parameters]
        self._groups = adam.state_dict()["param_groups"]

    def begin(self, optimizer: Any, deepspeed: ModuleType, stage: int) -> None:
        """Gives each partition of the weights the state that AdamW would make at its first step. DeepSpeed looks up the moments
        of all partitions as soon as the first parameter group has stepped, when the other groups would have none yet."""
        self._utils, self._stage = deepspeed.utils, stage
        shares = optimizer.fp32_partitioned_groups_flat if stage == 3 else optimizer.single_partition_of_fp32_groups
        for share in shares:
            moments = {name: torch.zeros_like(share) for name in _MOMENTS}
            self._adam.state[share] = {"step": torch.zeros((), device=share.device), **moments}
        if stage < 3:
            optimizer._lazy_init_hp_params_optimizer_state()

    def state_dict(self, is_kept: bool) -> dict[str, Any]:
        """The state as plain AdamW saves it, on the CPU. All ranks gather the moments; without `is_kept` none are returned."""
        state: dict[int, dict[str, Tensor]] = {}
        step = next(iter(self._adam.state.values()))["step"].cpu()
        for number, parameter in enumerate(self._parameters):
            whole = {name: self._utils.safe_get_full_optimizer_state(parameter, name) for name in _MOMENTS}
            if is_kept:
                state[number] = {"step": step.clone(), **{name: moment.cpu().clone() for name, moment in whole.items()}}
        return {"state": state, "param_groups": self._groups}

    def load(self, state: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Loads moments from `state_dict` or from plain AdamW, which has none for a parameter that never had a gradient."""
        step = max((moments["step"] for moments in state.values()), default=torch.zeros(()))
        for known in self._adam.state.values():
            known["step"].copy_(step)
        for number, (parameter, shape) in enumerate(zip(self._parameters, self._shapes, strict=True)):
            for name in _MOMENTS:
                value = state[number][name] if number in state else torch.zeros(shape)
                self._set(parameter, value.to(parameter.device), name)

    def _set(self, parameter: Any, value: Tensor, name: str) -> None:
        if self._stage < 3:
            self._utils.safe_set_full_optimizer_state(parameter, value, name)
            return
        # DeepSpeed's own function fails if the ranks don't divide the number of elements: shares are padded to equal sizes.
        size, rank = parameter.ds_tensor.numel(), dist.get_rank()
        padded = torch.zeros(size * dist.get_world_size(), device=value.device)
        padded[: value.numel()] = value.flatten()
        self._utils.safe_set_local_optimizer_state(parameter, padded[rank * size : (rank + 1) * size], name)


def _import_deepspeed(device: torch.device) -> ModuleType:
    """Imports DeepSpeed for this kind of device, which DeepSpeed reads from the environment when it is imported."""
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


def _join(device: torch.device, context: RankContext) -> None:
    """Makes the process group that DeepSpeed needs, if there is none. Raises ConfigError if the role isn't on all processes."""
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    if context.world_size != dist.get_world_size():
        raise ConfigError(
            f"{context.role}: deepspeed_train shards over all {dist.get_world_size()} processes of a run, and "
            f"{context.role} is on {context.world_size} of them; give it the device_mapping of all, or use torch_train"
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
