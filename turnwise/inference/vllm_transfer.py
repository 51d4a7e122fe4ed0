"""vLLM's own transfer of weights (`weight_transfer_config`), over gloo: its processes are members of the
trainer's group. They import this module as that of their worker extension, which registers the engine."""

from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from turnwise.inference.vllm_server import GLOO, WeightReader, pack_output_layers, silence_reload
from turnwise.runtime.torch_group import Meeting
from turnwise.transfer.group import WeightGroup
from turnwise.transfer.manifest import TensorSpec, WeightManifest
from turnwise.transfer.shared_memory import SharedMemory


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """How a worker joins the group of the trainer's first rank."""

    host: str
    port: int
    first_rank: int
    """The rank of the engine's first worker in the group."""
    size: int
    timeout_s: float
    interface: str = ""
    """As that of a `Meeting`."""


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """The tensors of an update, in the order in which they are sent."""

    names: list[str]
    dtypes: list[str]
    """By torch's names."""
    shapes: list[list[int]]

    def manifest(self) -> WeightManifest:
        tensors: dict[str, TensorSpec] = {}
        for name, dtype, shape in zip(self.names, self.dtypes, self.shapes, strict=True):
            width = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
            tensors[name] = TensorSpec(tuple(shape), dtype, width * torch.Size(shape).numel())
        return WeightManifest(tensors)


class GlooWeightTransferEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """Receives whole tensors in buckets, and loads this worker's part of them."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._group: WeightGroup | None = None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        meeting = Meeting(init_info.host, init_info.port, init_info.interface)
        group = WeightGroup.find(meeting, init_info.timeout_s)
        group.join(init_info.first_rank + self.parallel_config.rank, init_info.size)
        self._group = group

    def start_weight_update(self) -> None:
        silence_reload()
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class waits for an accelerator afterwards, which a CPU doesn't have.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        if self._group is None:
            raise RuntimeError("this worker has joined no group that sends weights")
        memory = SharedMemory(update_info.manifest())
        self._group.receive(memory)
        self.model.load_weights(iter(memory.weights))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        pack_output_layers(self.model)
        self.shutdown()

    def shutdown(self) -> None:
        self._group = None


class GlooWorker(WeightReader):
    """A mixin of vLLM's worker class (`worker_extension_cls`) for engines with this transfer."""


WeightTransferEngineFactory.register_engine(GLOO, GlooWeightTransferEngine)
