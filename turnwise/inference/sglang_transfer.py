"""The requests of SGLang's own transfer of weights, whose processes are members of the trainer's group, or
read copies on their devices. `sglang/srt/managers/io_struct.py` of SGLang 0.5.23 defines them."""

import base64
import pickle
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from turnwise.errors import LostWeightsError, ServerError, WorkerError
from turnwise.transfer.buckets import Bucket, buckets_of
from turnwise.transfer.group import GroupWeights
from turnwise.transfer.staging import DeviceCopies, DeviceWeights, device_id
from turnwise.transfer.weight_group import WeightGroup

_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def announce(weights: GroupWeights, replica: int) -> None:
    """Tells the group that the processes of a replica are coming, which can't do it themselves, and waits
    until all others have come. Raises LostWeightsError if they don't."""
    first_rank = weights.first_ranks[replica]
    ranks = range(first_rank, first_rank + weights.num_processes)
    try:
        WeightGroup.find(weights.meeting, weights.timeout_s).gather(ranks, weights.size)
    except WorkerError as error:
        raise LostWeightsError(str(error)) from error


def announce_end(weights: GroupWeights, replica: int) -> None:
    """Tells the sender that the processes of a replica have received all. It may have ended."""
    first_rank = weights.first_ranks[replica]
    with suppress(WorkerError):
        group = WeightGroup.find(weights.meeting, weights.timeout_s)
        group.finish(range(first_rank, first_rank + weights.num_processes))


def joining_request(weights: GroupWeights, replica: int) -> dict[str, Any]:
    """The body of `/init_weights_update_group`."""
    return {
        "master_address": weights.meeting.host,
        "master_port": weights.meeting.port,
        "rank_offset": weights.first_ranks[replica],
        "world_size": weights.size,
        "group_name": weights.name,
        "backend": _BACKENDS[weights.device_type],
    }


def bucket_requests(weights: GroupWeights) -> Iterator[dict[str, Any]]:
    """The bodies of `/update_weights_from_distributed`, one for each bucket that the first rank sends."""
    for bucket in buckets_of(weights.manifest):
        specs = bucket.tensors.values()
        yield {
            "names": list(bucket.tensors),
            "dtypes": [spec.dtype for spec in specs],
            "shapes": [list(spec.shape) for spec in specs],
            "group_name": weights.name,
            "flush_cache": False,
            "load_format": "flattened_bucket",
        }


def copy_requests(weights: DeviceCopies, devices: Sequence[str]) -> list[dict[str, Any]]:
    """The bodies of `/update_weights_from_tensor`, one for each bucket, with the copies on the replica's
    devices (torch's names). Raises ServerError if one has none."""
    known = weights.by_device()
    copies: list[DeviceWeights] = []
    for device in devices:
        copy = known.get(device_id(device))
        if not isinstance(copy, DeviceWeights):
            raise ServerError(f"no rank of the trainer has a copy of the weights on {device} for SGLang")
        copies.append(copy)
    requests: list[dict[str, Any]] = []
    for number, bucket in enumerate(buckets_of(weights.manifest)):
        payloads = [_pickled(bucket, copy.handles[number]) for copy in copies]
        requests.append(
            {
                "serialized_named_tensors": [base64.b64encode(payload).decode() for payload in payloads],
                "load_format": "flattened_bucket",
                "flush_cache": False,
            }
        )
    return requests


def _pickled(bucket: Bucket, handle: tuple[Any, ...]) -> bytes:
    """A bucket on one device, as SGLang's `MultiprocessingSerializer` writes it."""
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

    metadata: list[Any] = []
    start = 0
    for name, spec in bucket.tensors.items():
        end = start + spec.num_bytes
        dtype = getattr(torch, spec.dtype)
        shape = torch.Size(spec.shape)
        metadata.append(FlattenedTensorMetadata(name, shape, dtype, start, end, spec.num_bytes))
        start = end
    return pickle.dumps({"flattened_tensor": _Handle(handle), "metadata": metadata})


class _Handle:
    """Is pickled as the tensor that another process has on a GPU. Nothing is rebuilt here."""

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        self._arguments = arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return rebuild_cuda_tensor, self._arguments
