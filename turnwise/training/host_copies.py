"""Device memory whose contents are in host memory for a while."""

from collections.abc import Iterable

from torch import Tensor, UntypedStorage

from turnwise.protocols import MemoryKind


class HostCopies:
    """Moves what lies in the storages of tensors to host memory and back. Tensors and their views stay valid,
    since a storage keeps its identity: it is only empty meanwhile. So an engine whose buffers, parameters and
    optimiser share storages notices nothing.

    >>> import torch
    >>> weights = torch.arange(4.0)
    >>> copies = HostCopies()
    >>> copies.offload("weights", [weights, weights[2:]])
    >>> weights.untyped_storage().nbytes()
    0
    >>> copies.onload("weights")
    >>> weights[2:]
    tensor([2., 3.])
    """

    def __init__(self) -> None:
        self._copies: dict[MemoryKind, list[tuple[UntypedStorage, UntypedStorage]]] = {}
        """By kind: a storage of the device, and its contents."""

    def offload(self, kind: MemoryKind, tensors: Iterable[Tensor]) -> None:
        """Empties the storages of the tensors, which nobody may read before `onload`. Does nothing if this
        kind is in host memory already."""
        if kind in self._copies:
            return
        storages: dict[int, UntypedStorage] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage
        self._copies[kind] = []
        for storage in storages.values():
            copy = UntypedStorage(storage.nbytes(), device="cpu")
            copy.copy_(storage)
            storage.resize_(0)
            self._copies[kind].append((storage, copy))

    def onload(self, kind: MemoryKind) -> None:
        """Fills the storages again."""
        for storage, copy in self._copies.pop(kind, ()):
            storage.resize_(copy.nbytes())
            storage.copy_(copy)
