"""vLLM's own transfer of weights (`weight_transfer_config`): its processes are members of the trainer's
group, or read a copy on their device. They import this module as that of their worker extension, which
registers the engines."""

import pickle
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from turnwise.inference.vllm_server import ENGINES, WeightReader, pack_output_layers, silence_reload
from turnwise.runtime.torch_group import Meeting
from turnwise.transfer.manifest import WeightManifest
from turnwise.transfer.staging import device_id
from turnwise.transfer.weight_group import WeightGroup


@dataclass
class GroupInfo(WeightTransferInitInfo):
    """How a worker joins the group of the trainer's first rank."""

    host: str
    port: int
    interface: str
    """As those of a `Meeting`."""
    first_rank: int
    """The rank of the engine's first worker in the group."""
    size: int
    timeout_s: float
    device_type: str
    name: str
    """As those of `GroupWeights`."""


@dataclass
class CopyInfo(WeightTransferInitInfo):
    """Nothing has to be prepared for a copy on the worker's device."""


@dataclass
class WeightInfo(WeightTransferUpdateInfo):
    """What is received: of a group a `WeightManifest`, of copies a mapping of `device_id` to the copy."""

    pickled: bytes


class _CheckpointEngine(WeightTransferEngine[Any, WeightInfo]):
    """Loads whole tensors of a checkpoint: this worker's part of them."""

    update_info_cls = WeightInfo

    def start_weight_update(self) -> None:
        silence_reload()
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        # As the base class does, which would ask for an accelerator on a CPU.
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def receive_weights(self, update_info: WeightInfo) -> None:
        self.model.load_weights(self._tensors(pickle.loads(update_info.pickled)))

    @abstractmethod
    def _tensors(self, received: Any) -> Iterator[tuple[str, Tensor]]:
        """`(name, tensor)`, as they come."""

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        pack_output_layers(self.model)
        self.shutdown()


class GroupEngine(_CheckpointEngine):
    """Receives tensors in buckets, over gloo or NCCL, and loads each as it comes."""

    init_info_cls = GroupInfo

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._group: WeightGroup | None = None

    def init_transfer_engine(self, init_info: GroupInfo) -> None:
        meeting = Meeting(init_info.host, init_info.port, init_info.interface)
        device = self.device if init_info.device_type == "cuda" else "cpu"
        group = WeightGroup.find(meeting, init_info.timeout_s, device, init_info.name)
        group.join(init_info.first_rank + self.parallel_config.rank, init_info.size)
        self._group = group

    def _tensors(self, received: WeightManifest) -> Iterator[tuple[str, Tensor]]:
        if self._group is None:
            raise RuntimeError("this worker has joined no group that sends weights")
        return self._group.receive_tensors(received)

    def shutdown(self) -> None:
        if self._group is not None:
            self._group.leave()
        self._group = None


class CopyEngine(_CheckpointEngine):
    """Reads the copy of a trainer's rank on the same device."""

    init_info_cls = CopyInfo

    def init_transfer_engine(self, init_info: CopyInfo) -> None: ...

    def _tensors(self, received: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
        own = device_id(self.device)
        if own not in received:
            raise RuntimeError(f"no rank of the trainer has a copy on the device {own}")
        return iter(received[own])

    def shutdown(self) -> None: ...


class TransferWorker(WeightReader):
    """A mixin of vLLM's worker class (`worker_extension_cls`) for engines with a transfer of their own."""


for _backend, _name in ENGINES.items():
    WeightTransferEngineFactory.register_engine(_name, CopyEngine if _backend == "ipc" else GroupEngine)
