"""The form of a transfer inside one process: the server reads the trainer's tensors."""

from collections.abc import Callable, Iterable, Iterator

from torch import Tensor

from turnwise.errors import WorkerError
from turnwise.transfer.manifest import TensorSpec, WeightManifest


class LiveWeights:
    """Weights that are read from where the trainer has them. `read` begins to iterate over the trainer's
    tensors.

    >>> import torch
    >>> weights = LiveWeights.of(lambda: [("a", torch.ones(2, 3))])
    >>> [(name, tensor.sum().item()) for name, tensor in weights], weights.manifest.num_bytes
    ([('a', 6.0)], 24)
    """

    def __init__(self, manifest: WeightManifest, read: Callable[[], Iterable[tuple[str, Tensor]]]) -> None:
        self.manifest = manifest
        self._read = read

    @classmethod
    def of(cls, read: Callable[[], Iterable[tuple[str, Tensor]]]) -> "LiveWeights":
        """Weights whose manifest isn't known yet: it takes one iteration more."""
        return cls(manifest_of(read()), read)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return as_manifested(self.manifest, self._read())

    def on(self, node: str) -> "LiveWeights":
        return self


def manifest_of(tensors: Iterable[tuple[str, Tensor]]) -> WeightManifest:
    return WeightManifest({name: spec_of(tensor) for name, tensor in tensors})


def spec_of(tensor: Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.nbytes)


def as_manifested(
    manifest: WeightManifest, tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """The same pairs. Raises WorkerError for the first one that isn't as the manifest says, and at the end if
    one is missing."""
    missing = dict(manifest.tensors)
    for name, tensor in tensors:
        manifest.check_same(name, spec_of(tensor))
        missing.pop(name, None)
        yield name, tensor
    if missing:
        raise WorkerError(
            f"{next(iter(missing))} is missing, but it was among the tensors when they were first sent"
        )
