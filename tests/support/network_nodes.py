"""Two machines as two network namespaces on a veth pair: each has its own loopback and its own address."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

ADDRESSES = ("10.213.0.1", "10.213.0.2")


class NoNamespacesError(RuntimeError):
    """This machine lets nobody make network namespaces."""


@contextmanager
def two_nodes() -> Iterator[tuple[str, str]]:
    """The names of two namespaces, which reach each other at `ADDRESSES`.

    Raises:
        NoNamespacesError: see there.
    """
    if shutil.which("ip") is None:
        raise NoNamespacesError("there is no `ip` here (iproute2)")
    names = tuple(f"turnwise-{os.getpid()}-{index}" for index in range(2))
    links = tuple(f"tw{os.getpid() % 100_000}{index}" for index in range(2))
    with ExitStack() as stack:
        for name in names:
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "del", name)
        _ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for name, link, address in zip(names, links, ADDRESSES, strict=True):
            _ip("link", "set", link, "netns", name)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            _ip("-n", name, "link", "set", link, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield names[0], names[1]


def start(
    node: str, command: Sequence[str | Path], environment: Mapping[str, str], folder: Path
) -> subprocess.Popen[str]:
    """Starts a command in a namespace."""
    return subprocess.Popen(
        ["ip", "netns", "exec", node, *command],
        env=dict(environment),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _ip(*arguments: str) -> None:
    run = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if run.returncode:
        raise NoNamespacesError(f"`ip {' '.join(arguments)}` says: {run.stderr.strip()}")
