"""The messages between a process and its child, and their encoding."""

import io
import pickle
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import islice
from types import FunctionType
from typing import Any, NamedTuple

import cloudpickle
import torch

from turnwise.cluster.wire import Message
from turnwise.runtime.stopwatch import TokenCounts

RECORD = b"log"
"""Prefix of a message that holds a pickled log record. A message to the caller without this prefix or `DONE`
is a Reply."""
DONE = b"did"
"""Prefix of the message about a finished micro-batch. The number of the batch's tokens follows, in decimal
digits."""
_MIN_BUFFER_BYTES = 2**16  # a smaller array costs less to copy than to send by itself
_NUMPY_DTYPES = frozenset({torch.float32, torch.float64, torch.int64, torch.int32, torch.bool, torch.uint8})


class Command(NamedTuple):
    """A call of a method of the `Child` with these arguments."""

    method: str
    args: tuple[Any, ...]


class Parcel:
    """A command for one or several processes. Whoever sends it first packs it, once for all."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self._packing = threading.Lock()
        self._message: Any = None

    def message(self) -> Any:
        """What a wire sends. If the command can't be pickled, any Exception may be raised."""
        with self._packing:
            if self._message is None:
                self._message = self._packed()
            return self._message

    def _packed(self) -> Message:
        return pack(self.command)


class Network(NamedTuple):
    """How a process reaches the others of its process groups."""

    device: str
    """The process's device, as torch names it."""
    groups: Sequence[tuple[int, ...]]
    """The processes of each group beside that of all."""
    address: str = ""
    """The node's address; empty where all processes are on one machine."""
    interface: str = ""
    """The network interface; empty for that of the address."""


class SetUp(NamedTuple):
    """What a process takes over from its starter, and the function that it then calls."""

    environment: dict[str, str]
    """Empty if a launcher has set the environment, or Ray. Then folders of `path` are added to the process's,
    else they replace them."""
    path: list[str]
    folder: str
    log_levels: dict[str, int]
    """Name of a logger → level."""
    function: Callable[[], object]


@dataclass(slots=True)
class Reply:
    """A call's result or error, and the stopwatch's notes since the last reply. `spans` are arguments of
    `Stopwatch.add`."""

    value: Any = None
    error: BaseException | None = None
    spans: list[tuple[str, str, float, float, dict[str, Any]]] = field(default_factory=list)
    tokens: TokenCounts = field(default_factory=TokenCounts)
    num_sampled: int = 0


class _Pickler(cloudpickle.Pickler):
    """Sends classes and functions of a script or notebook as code, since the other process can't import them.
    Sends tensors as numpy arrays, which takes a tenth of the time: a loss reports dozens of numbers for each
    micro-batch."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.layout is not torch.strided or value.is_quantized:
            return (
                super().reducer_override(value) if isinstance(value, type | FunctionType) else NotImplemented
            )
        copy = value.detach().cpu()
        is_trained = value.requires_grad and value.is_leaf
        if value.dtype in _NUMPY_DTYPES:
            return _tensor, (copy.numpy(), is_trained)
        return _tensor, (copy.reshape(-1).view(torch.uint8).numpy(), is_trained, value.dtype, value.shape)


def dumps(value: Any) -> bytes:
    """The pickled value; plain dense tensors become copies on the CPU. If the value can't be pickled, any
    Exception may be raised: objects define how they are pickled."""
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


loads = pickle.loads


def pack(value: Any) -> Message:
    """Pickles as `dumps` does, but leaves large arrays where they are: the message refers to their memory."""
    file = io.BytesIO()
    buffers: list[memoryview] = []

    def is_small(buffer: pickle.PickleBuffer) -> bool:
        """Says whether the array is pickled with the rest."""
        array_bytes = buffer.raw()
        if array_bytes.nbytes < _MIN_BUFFER_BYTES:
            return True
        buffers.append(array_bytes)
        return False

    _Pickler(file, pickle.HIGHEST_PROTOCOL, buffer_callback=is_small).dump(value)
    return Message(file.getvalue(), buffers)


def unpack(message: Message) -> Any:
    """What was packed. Large arrays use the memory of the message's buffers."""
    return pickle.loads(message.content, buffers=message.buffers)


def joined(messages: Sequence[Message]) -> Message:
    """One message that holds several, each of which is unpacked by itself: if one can't be, the others
    can."""
    parts = [(message.content, len(message.buffers)) for message in messages]
    buffers = [buffer for message in messages for buffer in message.buffers]
    return Message(pickle.dumps(parts, pickle.HIGHEST_PROTOCOL), buffers)


def parted(message: Message) -> list[Message]:
    """The messages that `joined` made one of."""
    buffers = iter(message.buffers)
    parts = pickle.loads(message.content)
    return [Message(content, list(islice(buffers, num_buffers))) for content, num_buffers in parts]


def unsendable_part(value: Any, name: str, depth: int = 5) -> str:
    """The part of a value that can't be pickled, as `name.attribute`, at most `depth` attributes deep, with
    its type."""
    for part, inner in _parts(value).items() if depth else ():
        try:
            dumps(inner)
        except Exception:  # boundary: a user's object defines how it is pickled
            return unsendable_part(inner, f"{name}.{part}", depth - 1)
    return f"{name} ({type(value).__name__})"


def _parts(value: Any) -> dict[str, Any]:
    is_plain = is_dataclass(value) and not isinstance(value, type)
    parts = {field.name: getattr(value, field.name) for field in fields(value)} if is_plain else {}
    if "__dict__" in dir(value):
        parts.update(vars(value))
    return parts


def _tensor(
    array: Any,
    requires_grad: bool,
    dtype: torch.dtype | None = None,
    shape: tuple[int, ...] | None = None,
) -> torch.Tensor:
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    if dtype is not None and shape is not None:
        tensor = tensor.view(dtype).view(shape) if tensor.numel() else torch.empty(shape, dtype=dtype)
    return tensor.requires_grad_(requires_grad)
