"""What a node of Ray is and has, as its agent tells. This module imports neither ray nor torch, which would
take memory of the accelerators."""

import os
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from turnwise import __version__
from turnwise.cluster.beats import ProcessKey
from turnwise.errors import counted
from turnwise.runtime.machine import num_cores

_SHARED = "/dev/shm"
_QUERY = ("nvidia-smi", "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits")
_QUERY_S = 20.0  # seconds that its answer may take


class NodeFacts(NamedTuple):
    """What a node is and has."""

    devices: tuple[str, ...]
    """Ids of the accelerators that Ray has assigned to the run, in the order of its devices."""
    num_cores: int
    """Number of cores that the node's processes may use."""
    versions: dict[str, str]
    """Versions that must be equal on all nodes, since functions are sent as code."""
    agent: ProcessKey
    device_bytes: tuple[int | None, ...] = ()
    """Memory of each of the devices; None if it isn't known."""
    memory_bytes: int | None = None
    """The node's own memory; None if it isn't known."""
    shared_bytes: int | None = None
    """Size of /dev/shm; None if there is none."""

    def describe(self) -> str:
        """The figures in a few words.

        >>> key = ProcessKey(1, "")
        >>> NodeFacts(("0", "1"), 8, {}, key, (80 * 10**9, None), 64 * 10**9, 67_108_864).describe()
        '8 cores, 64.0 GB of memory, /dev/shm of 0.1 GB, 2 devices (80.0 GB, unknown)'
        """
        parts = [counted(self.num_cores, "core")]
        if self.memory_bytes is not None:
            parts.append(f"{_gigabytes(self.memory_bytes)} of memory")
        if self.shared_bytes is not None:
            parts.append(f"{_SHARED} of {_gigabytes(self.shared_bytes)}")
        if self.devices:
            sizes = ", ".join(map(_gigabytes, self.device_bytes))
            parts.append(f"{counted(len(self.devices), 'device')} ({sizes})")
        return ", ".join(parts)


def node_facts() -> NodeFacts:
    """The facts of this node, in a process to which Ray has assigned the node's devices."""
    # Ray sets this variable to the accelerators that it has assigned to an actor.
    devices = tuple(filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")))
    return NodeFacts(
        devices,
        num_cores(),
        versions(),
        ProcessKey.of_this(),
        memory_of(devices, _listed_devices() if devices else ""),
        _memory_bytes(),
        _shared_bytes(),
    )


def versions() -> dict[str, str]:
    """Versions that must be equal in all processes of a run. turnwise needn't be installed."""
    found = {"turnwise": __version__, "Python": platform.python_version()}
    for name in ("torch", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found


def memory_of(devices: Sequence[str], listed: str) -> tuple[int | None, ...]:
    """The bytes of each device, by its number or id, of those that the driver's tool lists; None for one that
    it doesn't.

    >>> memory_of(("1", "GPU-a", "7"), "0, GPU-a, 40960\\n1, GPU-b, 81920\\n")
    (85899345920, 42949672960, None)
    """
    sizes: dict[str, int] = {}
    for line in listed.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 3 and fields[2].isdigit():
            index, name, megabytes = fields
            sizes[index] = sizes[name] = int(megabytes) * 2**20
    return tuple(sizes.get(device) for device in devices)


def _listed_devices() -> str:
    try:
        listing = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_QUERY_S)
    except (OSError, subprocess.TimeoutExpired):  # other accelerators have other tools
        return ""
    return listing.stdout


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def _shared_bytes() -> int | None:
    try:
        status = os.statvfs(_SHARED)
    except OSError:
        return None
    return status.f_blocks * status.f_frsize


def _gigabytes(number: int | None) -> str:
    return "unknown" if number is None else f"{number / 1e9:.1f} GB"
