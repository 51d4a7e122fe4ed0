"""How a run joins Ray, and where Ray's own output goes. This module doesn't import ray."""

import ipaddress
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from turnwise.errors import NotAvailableError
from turnwise.runtime.machine import Node

logger = logging.getLogger(__name__)

_OUTAGE_S = 0.5  # seconds between two calls of an actor that fail
_CONNECT_S = 10.0  # seconds that Ray's head has to accept a connection


@dataclass(frozen=True)
class RaySettings:
    """How a run joins Ray."""

    address: str = ""
    """`HOST:PORT`, or `auto` for the Ray that runs here; empty for a Ray of the run's own on this machine."""
    interface: str = ""
    """The network interface between ranks; empty for that of the address by which Ray knows a node."""
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    start_s: float | None = None
    """Seconds that the start of actors may take; None = no limit."""
    node_s: float = 30.0
    """Seconds of silence after which a node counts as lost."""
    paths: Mapping[str, str] = field(default_factory=dict)
    """What every node of the run has to see: the key of the config that names it → a path."""
    stopped_s: float | None = None
    """Seconds that the process of the run may stand still before its actors end; None = no limit."""


_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_COUNTERS = "[state-dump]"
"""Begins the counters that a raylet writes often: the last lines of one that has ended are mostly these."""


class RayLines:
    """Standard output, but what threads of Ray print goes to the log, without colours and counters. In all
    else it is the stream that it stands for: a base class of streams would answer for that, such as that it
    is no terminal."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        if not threading.current_thread().name.startswith("ray_"):
            return int(self.stream.write(text))
        for line in _COLOUR.sub("", text).splitlines():
            if line.strip() and _COUNTERS not in line:
                logger.warning("ray: %s", line)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)


class RayRecords(logging.Handler):
    """Passes the records of Ray's logger to ours, prefixed."""

    def emit(self, record: logging.LogRecord) -> None:
        logger.log(record.levelno, "ray: %s", record.getMessage())


class Outage:
    """Whether calls of an actor fail at the moment without telling if it lives. `pause` waits for seconds."""

    def __init__(self, pause: Callable[[float], object] = time.sleep) -> None:
        self.is_on = False
        self._pause = pause

    def note(self, error: Exception) -> None:
        """Notes a call that has failed, and waits: such calls fail at once. Only the first of several in a
        row is logged."""
        if not self.is_on:
            self.is_on = True
            logger.warning("ray: %s", error)
        self._pause(_OUTAGE_S)

    def end(self) -> None:
        """Notes a call that has been answered."""
        if self.is_on:
            self.is_on = False
            logger.warning("ray: the actor answers again")


def fate_text(cause: str) -> str:
    """Ray's text about the end of an actor, without its advice.

    >>> fate_text("The actor died. Worker exit detail: it exits with code 1. Some common causes include: …")
    'it exits with code 1.'
    """
    _, _, detail = cause.rpartition("Worker exit detail: ")
    detail, _, _ = detail.partition(" Some common causes")
    return " ".join(detail.split()) or "it isn't known how"


def reason_of(error: Exception) -> str:
    """The reason in an error of Ray, without its traceback and advice.

    >>> reason_of(RuntimeError("a traceback\\n  of lines\\n\\x1b[36mValueError: no room\\x1b[39m"))
    'ValueError: no room'
    """
    text = _COLOUR.sub("", str(error))
    if "Worker exit detail: " in text:
        return fate_text(text)
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__


def is_of_lost_node(cause: str) -> bool:
    """Whether Ray's text about the end of an actor says that its node was lost.

    >>> is_of_lost_node("The actor died because its node has died. Node Id: 5f")
    True
    """
    return "its node has died" in cause


def with_own_names(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """The nodes, those of different addresses under different names: machines that were copied share a host
    name, and by a node's name a run knows whose memory a process can read.

    >>> same = [Node(name="gpu", address="10.0.0.1"), Node(name="gpu", address="10.0.0.2")]
    >>> [node.name for node in with_own_names(same)]
    ['gpu (10.0.0.1)', 'gpu (10.0.0.2)']
    """
    addresses: dict[str, set[str]] = {}
    for node in nodes:
        addresses.setdefault(node.name, set()).add(node.address)
    return tuple(
        replace(node, name=f"{node.name} ({node.address})") if len(addresses[node.name]) > 1 else node
        for node in nodes
    )


def require_addresses(nodes: Sequence[Node]) -> None:
    """Raises NotAvailableError if Ray knows a node, one of several machines, by an address that reaches only
    the machine itself.

    >>> require_addresses([Node(address="10.0.0.1"), Node(address="10.0.0.2")])
    """
    if len({node.address for node in nodes}) < 2:
        return
    for node in nodes:
        if ipaddress.ip_address(node.address).is_loopback:
            raise NotAvailableError(
                f"Ray knows the node {node.name} as {node.address}, where other nodes reach only themselves, "
                "since its name stands for that address there; start its Ray with "
                "`--node-ip-address=` and an address that all nodes reach"
            )


def require_head(address: str) -> None:
    """Raises NotAvailableError if nothing listens at the address of Ray's head, HOST:PORT. Ray itself tries
    for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except (OSError, ValueError, OverflowError) as error:
        raise NotAvailableError(
            f"this run can't join the Ray at {address}: {error}; `ray start --head` prints the address "
            "(cluster.address, or RAY_ADDRESS), and a firewall has to let this machine reach it"
        ) from error
