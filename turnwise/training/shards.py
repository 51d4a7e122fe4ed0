"""A model of transformers whose parameters are shared out among ranks by torch's `fully_shard` (FSDP2; Zhao
et al. 2023, arXiv:2304.11277)."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from turnwise.errors import ConfigError
from turnwise.models.slices import SlicedModel
from turnwise.runtime.torch_group import mesh_groups
from turnwise.spec.fsdp2_options import Fsdp2Options
from turnwise.training.share_writer import Block

Result = TypeVar("Result")


class ShardedModel(nn.Module):
    """A module around a model, whose parameters are sharded in place: each decoder layer is gathered by
    itself, and what is outside the layers together. All ranks must call the same methods in the same order.

    Gradients are summed over the ranks; torch's default would average them. Raises ConfigError if torch
    refuses the options."""

    def __init__(
        self,
        model: PreTrainedModel,
        options: Fsdp2Options,
        device: torch.device,
        peers: Sequence[int],
    ) -> None:
        super().__init__()
        self.model = model
        self._mesh = _mesh(device, peers, options.fsdp_size or len(peers))
        self._shard_dim = self._mesh.ndim - 1
        self.share_device = torch.device("cpu") if options.offload_policy else device
        arguments: dict[str, Any] = {
            "mesh": self._mesh,
            "reshard_after_forward": options.reshard_after_forward,
            "mp_policy": MixedPrecisionPolicy(_dtype(options.param_dtype), _dtype(options.reduce_dtype)),
            "offload_policy": _offload(options, device),
        }
        try:
            for layer in _layers(model):
                fully_shard(layer, **arguments)
            fully_shard(self, **arguments)
        except ValueError as error:
            raise ConfigError(f"strategy_args.strategy_config: torch's fully_shard says: {error}") from error
        self._units = [module for module in self.modules() if isinstance(module, FSDPModule)]
        for unit in self._units:
            unit.set_force_sum_reduction_for_comms(True)
            unit.set_gradient_divide_factor(1.0)

    def forward(self, compute: Callable[[], Result]) -> Result:
        """What `compute` returns. While it runs, the parameters outside the layers are whole, and a layer's
        are while the layer runs. The backward pass gathers parameters again if the result is a tensor or a
        dictionary of tensors."""
        return compute()

    @property
    def num_shards(self) -> int:
        """Number of ranks that share one model."""
        return self._mesh.size(self._shard_dim)

    @property
    def num_copies(self) -> int:
        return self._mesh.size() // self.num_shards

    def release(self) -> None:
        """Frees whole parameters that a forward pass without a backward pass has left."""
        for unit in self._units:
            unit.reshard()

    def sync_gradients(self, is_on: bool) -> None:
        """Whether the next backward passes sum gradients over the ranks. Otherwise each rank adds up its
        whole gradients, and the next pass that sums them includes these."""
        self._units[0].set_requires_gradient_sync(is_on)

    def sum_over_shards(self, value: Tensor) -> None:
        """Replaces the value by the sum of those of the ranks that share one model."""
        dist.all_reduce(value, group=self._mesh.get_group(self._shard_dim))

    @torch.no_grad()
    def set_whole(self, tensor: Tensor, values: Tensor) -> None:
        """Overwrites this rank's share of a tensor, given the values of the whole one."""
        if isinstance(tensor, DTensor):
            start, stop = self.rows_of(tensor)
            values = values[start:stop]
        share(tensor).copy_(values)

    def held_rows(self, tensor: Tensor) -> tuple[int, int]:
        """`rows_of` a tensor; all rows of one that isn't sharded."""
        if isinstance(tensor, DTensor):
            return self.rows_of(tensor)
        return 0, tensor.shape[0] if tensor.ndim else 1

    def rows_of(self, parameter: Tensor) -> tuple[int, int]:
        """The first row of this rank's share of a parameter, and the row behind its last."""
        num_rows = parameter.shape[0]
        size = -(-num_rows // self.num_shards)
        start = min(self._mesh.get_local_rank(self._shard_dim) * size, num_rows)
        return start, min(start + size, num_rows)

    def blocks(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Block]:
        """This rank's shares of tensors, to be saved. Copies of the model deal them out among themselves."""
        copy = self._mesh.get_local_rank(0) if self.num_copies > 1 else 0
        for number, (name, tensor) in enumerate(tensors):
            values = share(tensor).detach()
            is_written = number % self.num_copies == copy
            if not isinstance(tensor, DTensor):  # every rank has all of it
                is_written = is_written and self._mesh.get_local_rank(self._shard_dim) == 0
            start, stop = self.held_rows(tensor)
            if start == stop:
                continue
            offsets = [0] * tensor.ndim
            offsets[:1] = [start] * min(tensor.ndim, 1)
            yield Block(name, tuple(tensor.shape), tuple(offsets), values, is_written)

    @contextmanager
    def whole(self, parameters: Sequence[Tensor], is_changed: bool = False) -> Iterator[None]:
        """In this context the model's modules hold these parameters whole, in fp32. If `is_changed`, each
        rank's shares become what was written into them."""
        replaced: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []
        members = {id(parameter) for parameter in parameters}
        copies: dict[int, nn.Parameter] = {}
        for module in self.modules():
            for name, parameter in module._parameters.items():
                if parameter is None or id(parameter) not in members:
                    continue
                if id(parameter) not in copies:
                    tensor = whole_tensor(parameter.detach()).clone()
                    copies[id(parameter)] = nn.Parameter(tensor, parameter.requires_grad)
                replaced.append((module, name, parameter, copies[id(parameter)]))
        for module, name, _, copy in replaced:
            module._parameters[name] = copy
        try:
            yield
        finally:
            for module, name, parameter, copy in replaced:
                module._parameters[name] = parameter
                if is_changed:
                    self.set_whole(parameter, copy.detach())


def fill_shares(slices: SlicedModel, sharded: ShardedModel) -> None:
    """Reads this rank's shares of the parameters that the sharded model doesn't have yet."""
    made: dict[int, nn.Parameter] = {}
    for module, name, tensor_name in slices.places:
        empty: Any = module._parameters[name]
        if id(empty) not in made:
            start, stop = sharded.rows_of(empty)
            rows = slices.rows(tensor_name, start, stop, empty.shape)
            whole = DTensor.from_local(
                rows.to(sharded.share_device),
                empty.device_mesh,
                empty.placements,
                run_check=False,
                shape=empty.shape,
                stride=empty.stride(),
            )
            made[id(empty)] = nn.Parameter(whole, empty.requires_grad)
        setattr(module, name, made[id(empty)])


def whole_tensor(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded. All ranks take part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def share(tensor: Tensor) -> Tensor:
    """This rank's share of a tensor; all of one that isn't sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    """The modules that are gathered one at a time: those that transformers keeps on one device."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def _mesh(device: torch.device, peers: Sequence[int], size: int) -> DeviceMesh:
    """The ranks with these numbers, `size` consecutive ones of which share one model."""
    copies, shards = mesh_groups(peers, size, device.type)
    if size == len(peers):
        return DeviceMesh.from_group(shards, device.type, mesh_dim_names=("shard",))
    numbers = torch.tensor(list(peers)).view(-1, size)
    return DeviceMesh.from_group(
        [copies, shards], device.type, mesh=numbers, mesh_dim_names=("copy", "shard")
    )


def _dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _offload(options: Fsdp2Options, device: torch.device) -> OffloadPolicy:
    if not options.offload_policy:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=device.type == "cuda")
