"""Megatron's gradient buffers and its AdamW, whose moments are divided among the copies of the model if it is
the distributed one (ZeRO 1; Rajbhandari et al. 2020, arXiv:1910.02054)."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Literal

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from torch import Tensor, nn

from turnwise.training.megatron.groups import sum_over_copies
from turnwise.training.megatron.model import DecoderPart
from turnwise.training.optimizer import OptimizerSettings

MOMENTS: tuple[Literal["exp_avg"], Literal["exp_avg_sq"]] = ("exp_avg", "exp_avg_sq")


class MegatronAdam:
    """Gradients and AdamW of the parts of the model that this rank holds. All ranks must call its methods
    together."""

    def __init__(
        self, parts: Sequence[DecoderPart], settings: OptimizerSettings, is_distributed: bool
    ) -> None:
        self._is_distributed = is_distributed
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=is_distributed,
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=False,
        )
        self.parts = [
            DistributedDataParallel(part.config, ddp, part, disable_bucketing=number > 0)
            for number, part in enumerate(parts)
        ]
        """The parts in Megatron's wrapper, which adds gradients up in buffers."""
        config = OptimizerConfig(
            optimizer="adam",
            lr=settings.learning_rate,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.betas[0],
            adam_beta2=settings.betas[1],
            adam_eps=settings.eps,
            params_dtype=torch.float32,
            use_distributed_optimizer=is_distributed,
            clip_grad=0.0,
        )
        # Tensors of one dimension get no weight decay, as in `build_optimizer`.
        self._chain = get_megatron_optimizer(config, self.parts, use_gloo_process_groups=False)
        self._optimizers = [o for o in self._chain.chained_optimizers if not o.is_stub_optimizer]
        for optimizer in self._optimizers:
            _begin(optimizer.optimizer)
        for group in self._chain.param_groups:
            # Megatron leaves this to its own schedule, which isn't used.
            group["weight_decay"] = settings.weight_decay * group["wd_mult"]

    def discard_gradients(self) -> None:
        for part in self.parts:
            part.zero_grad_buffer()
        self._chain.zero_grad()

    def sum_gradients(self) -> None:
        """Sums gradients over the copies of the model, and those of weights that several ranks of a copy
        hold."""
        finalize_model_grads(self.parts)

    def divide(self, divisor: float) -> float:
        """Divides the gradients; returns the 2-norm of the whole gradient afterwards."""
        if divisor != 1.0:
            for part in self.parts:
                part.scale_gradients(1.0 / divisor)
        self._chain.prepare_grads()
        norm: float = self._chain.get_grad_norm()
        return norm

    def clip(self, factor: float) -> None:
        """Multiplies the gradients."""
        for parameter in self._chain.get_parameters():
            if parameter.grad is not None:
                parameter.grad *= factor

    def step(self, learning_rate: float) -> None:
        for group in self._chain.param_groups:
            group["lr"] = learning_rate
        self._chain.step_with_ready_grads()

    def tensors(self) -> Iterator[Tensor]:
        """All that it keeps on the device: the gradient buffers, and AdamW's moments."""
        for part in self.parts:
            for parameter in part.parameters():
                if parameter.requires_grad:
                    yield parameter.main_grad
        for optimizer in self._optimizers:
            for state in optimizer.optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))

    def refresh(self) -> None:
        """Call this after weights were set from outside."""
        self._chain.reload_model_params()

    # What AdamW holds of a parameter

    def whole_gradient(self, parameter: nn.Parameter) -> Tensor:
        """The gradient after `divide`, of all that this rank holds of a parameter."""
        return self._assembled(parameter, lambda _, owned: owned.grad)

    def whole_moment(self, parameter: nn.Parameter, name: str) -> Tensor:
        """One of the `MOMENTS`, of all that this rank holds of a parameter."""
        return self._assembled(parameter, lambda adam, owned: adam.state[owned][name])

    @torch.no_grad()
    def set_moment(self, parameter: nn.Parameter, name: str, values: Tensor) -> None:
        """Sets what this rank keeps of a moment, given that of all that it holds of the parameter."""
        for adam, owned, start, stop in self._owned(parameter):
            adam.state[owned][name].view(-1).copy_(values.reshape(-1)[start:stop])

    @property
    def num_steps(self) -> Tensor:
        """float32 []: the number of steps so far, by which AdamW corrects its moments."""
        for optimizer in self._optimizers:
            for group in optimizer.optimizer.param_groups:
                if "step" in group:
                    return torch.tensor(float(group["step"]))
            for state in optimizer.optimizer.state.values():
                step: Tensor = state["step"]
                return step.detach().float().cpu().clone()
        return torch.zeros(())

    def set_num_steps(self, number: Tensor) -> None:
        for optimizer in self._optimizers:
            for group in optimizer.optimizer.param_groups:
                if "step" in group:
                    group["step"] = int(number)
            for state in optimizer.optimizer.state.values():
                if "step" in state:
                    state["step"].copy_(number)

    def _assembled(self, parameter: nn.Parameter, value_of: Callable[[Any, Tensor], Any]) -> Tensor:
        whole = torch.zeros_like(parameter.detach(), memory_format=torch.contiguous_format)
        for adam, owned, start, stop in self._owned(parameter):
            value = value_of(adam, owned)
            if value is not None:
                whole.view(-1)[start:stop] = value.reshape(-1)
        if self._is_distributed:
            sum_over_copies(whole)
        return whole

    def _owned(self, parameter: nn.Parameter) -> Iterator[tuple[Any, Tensor, int, int]]:
        """AdamW, its tensor of a parameter, and which elements of the parameter these are; nothing if another
        copy of the model keeps them."""
        for optimizer in self._optimizers:
            if not self._is_distributed:
                yield optimizer.optimizer, parameter, 0, parameter.numel()
                return
            with suppress(KeyError):  # it has no element of this parameter
                group, number = optimizer.model_param_group_index_map[parameter]
                elements = optimizer._get_model_param_range_map(parameter)["param"]
                owned = optimizer.optimizer.param_groups[group]["params"][number]
                yield optimizer.optimizer, owned, elements.start, elements.end
                return


def _begin(adam: Any) -> None:
    """Gives each tensor the state that AdamW would make at its first step, so that it can be saved and
    loaded at any time."""
    # torch's AdamW counts steps for each tensor, that of TransformerEngine for each group.
    counts_by_group = "bias_correction" in adam.defaults
    for group in adam.param_groups:
        for parameter in group["params"]:
            state = adam.state[parameter]
            for name in MOMENTS:
                state.setdefault(name, torch.zeros_like(parameter.detach()))
            if not counts_by_group:
                state.setdefault("step", torch.zeros(()))
        if counts_by_group:
            group.setdefault("step", 0)
