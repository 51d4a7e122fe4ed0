"""Megatron's process groups, of which a process has one set for all of its roles."""

from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import Tensor

from turnwise.errors import ConfigError
from turnwise.runtime.rank import RankContext
from turnwise.runtime.torch_group import require_group
from turnwise.spec.megatron_options import MegatronOptions

_OPERATIONS = {"max": dist.ReduceOp.MAX, "sum": dist.ReduceOp.SUM}
_TIMEOUT_MINUTES = 24 * 60
"""The run's deadlines, not this, bound the wait for another rank."""


def join(options: MegatronOptions, context: RankContext) -> None:
    """Divides the processes as the options say. Raises ConfigError if the role isn't on all processes, if
    its ranks aren't in their order, or if another role in them is divided in another way."""
    require_group(context.device)
    num_processes = dist.get_world_size()
    if context.peers != tuple(range(num_processes)):
        raise ConfigError(
            f"{context.role}: Megatron divides all {num_processes} processes of a run, in their order, and "
            f"{context.role} has {', '.join(map(str, context.peers))}; give it the device_mapping of all "
            "devices in ascending order, or use fsdp2_train (fsdp2_infer for a frozen model)"
        )
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            options.tp,
            options.pp,
            options.vp,
            context_parallel_size=options.cp,
            # There are no experts, but in this order Megatron wants as many copies of them as of the rest.
            expert_tensor_parallel_size=options.tp * options.cp,
            order="tp-cp-ep-pp-dp",  # as `Layout` counts
            distributed_timeout_minutes=_TIMEOUT_MINUTES,
            create_gloo_process_groups=False,
        )
        if context.device.startswith("cuda"):
            model_parallel_cuda_manual_seed(0)
        return
    sizes = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
    )
    if sizes != options.sizes:
        raise ConfigError(
            f"{context.role}: Megatron divides a process once, for all roles in it, and another role has "
            f"tensor {sizes[0]} × pipeline {sizes[1]} (virtual {sizes[2] or 1}) × context {sizes[3]}; "
            "give all Megatron roles the same sizes, or use another strategy for one of them"
        )


def tensor_rank() -> tuple[int, int]:
    """`(size, rank)` among the tensor-parallel ranks."""
    size: int = parallel_state.get_tensor_model_parallel_world_size()
    return size, parallel_state.get_tensor_model_parallel_rank()


def reduce_over_tensor_ranks(tensor: Tensor, operation: Literal["max", "sum"]) -> None:
    """Replaces a tensor by the maximum or sum over the tensor-parallel ranks."""
    dist.all_reduce(tensor, _OPERATIONS[operation], parallel_state.get_tensor_model_parallel_group())


def tensor_parts(tensor: Tensor) -> list[Tensor]:
    """The tensors of all tensor-parallel ranks, in their order."""
    size, _ = tensor_rank()
    if size == 1:
        return [tensor]
    parts = [torch.empty_like(tensor) for _ in range(size)]
    dist.all_gather(parts, tensor.contiguous(), parallel_state.get_tensor_model_parallel_group())
    return parts


def context_rank() -> tuple[int, int]:
    """`(size, rank)` among the ranks that share the tokens of each sample."""
    size: int = parallel_state.get_context_parallel_world_size()
    return size, parallel_state.get_context_parallel_rank()


def sum_over_context_ranks(tensor: Tensor) -> None:
    """Replaces a tensor by its sum over the ranks that share the tokens of each sample."""
    dist.all_reduce(tensor, group=parallel_state.get_context_parallel_group())


def stage_rank() -> tuple[int, int]:
    """`(size, rank)` among the pipeline stages."""
    size: int = parallel_state.get_pipeline_model_parallel_world_size()
    return size, parallel_state.get_pipeline_model_parallel_rank()


def send_from_stage(tensor: Tensor, stage: int) -> None:
    """Gives all stages the values that a tensor has on one."""
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() > 1:
        dist.broadcast(tensor, dist.get_global_rank(group, stage), group=group)


def on_all_stages(value: Any) -> list[Any]:
    """The values of all pipeline stages, in their order. They are pickled."""
    size, _ = stage_rank()
    values: list[Any] = [None] * size
    dist.all_gather_object(values, value, group=parallel_state.get_pipeline_model_parallel_group())
    return values


def copy_rank() -> tuple[int, int]:
    """`(size, rank)` among the ranks that hold the same part of the model: copies, and the context-parallel
    ranks of each."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return group.size(), group.rank()


def sum_over_copies(tensor: Tensor) -> None:
    """Replaces a tensor by its sum over the ranks that hold the same part of the model."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if group.size() > 1:
        dist.all_reduce(tensor, group=group)
