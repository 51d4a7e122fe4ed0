"""Joins a Ray and leaves it, and says which nodes it knows."""

import ipaddress
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray

from turnwise.cluster.ray_settings import (
    RayLines,
    RayRecords,
    RaySettings,
    require_addresses,
    require_head,
    with_own_names,
)
from turnwise.errors import NotAvailableError
from turnwise.runtime.machine import Machine, Node, num_cores

logger = logging.getLogger(__name__)

_RAY_LOGGER = logging.getLogger("ray")
_RECORDS = RayRecords()
_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals whose handlers `ray.init` replaces: with Ray's own a run ends with nothing saved."""
_FOREIGN = ("SLURM_", "PMI_", "PMIX_")
"""Variables by which libraries would join the processes of a scheduler's job step instead of ours."""
_NUM_STARTS = 3
"""How often a Ray of the run's own is started: on a busy machine it gives up after 30 s, which no setting
changes."""
_REASON_LENGTH = 400
"""Characters of Ray's own reason in an error: that of two versions takes several lines."""
_VARIABLES = {"RAY_USAGE_STATS_ENABLED": "0"}
_OWN_VARIABLES = {"RAY_memory_monitor_refresh_ms": "0"}
"""Variables of a Ray that a run starts: without its monitor, which would kill actors because of what other
programs of this machine use."""


def join_ray(settings: RaySettings, num_slots: int = 1) -> Machine:
    """The machine of the Ray that this process joins, or starts. Its nodes are sorted by address, the head
    first; one that Ray starts here has at least `num_slots` slots. A process that has joined already stays.
    Raises NotAvailableError if Ray can't be joined."""
    if not ray.is_initialized():
        _join(settings, num_slots)
    nodes = _nodes()
    require_addresses(nodes)
    return Machine(nodes)


def leave_ray() -> None:
    """Leaves Ray, and ends it if this process has started it."""
    if isinstance(sys.stdout, RayLines):
        sys.stdout = sys.stdout.stream
    _RAY_LOGGER.removeHandler(_RECORDS)
    _RAY_LOGGER.propagate = True
    with _handlers_kept():
        ray.shutdown()


def _join(settings: RaySettings, num_slots: int) -> None:
    for name in list(os.environ):
        if name.startswith(_FOREIGN):
            del os.environ[name]
    os.environ.update(_VARIABLES)
    options: dict[str, Any] = {"address": settings.address or "local"}
    if not settings.address:
        os.environ.update(_OWN_VARIABLES)
        options["num_cpus"] = max(num_slots, num_cores())
        options["include_dashboard"] = False
    if settings.runtime_env:
        options["runtime_env"] = dict(settings.runtime_env)
    head = os.environ.get("RAY_ADDRESS", "") if settings.address == "auto" else settings.address
    if ":" in head:
        require_head(head)
    num_attempts = 1 if settings.address else _NUM_STARTS
    for attempt in range(1, num_attempts + 1):
        try:
            with _handlers_kept():
                ray.init(**options, log_to_driver=False, configure_logging=False)
            break
        except Exception as error:  # boundary: a start of Ray that takes too long raises an Exception
            reason = " ".join(str(error).split())[:_REASON_LENGTH]
            if attempt == num_attempts:
                raise NotAvailableError(f"{_failure(settings)}: {reason}") from error
            logger.warning("ray: %s (start %d of %d)", reason, attempt, num_attempts)
    sys.stdout = RayLines(sys.stdout)
    _RAY_LOGGER.addHandler(_RECORDS)
    _RAY_LOGGER.propagate = False


def _failure(settings: RaySettings) -> str:
    if not settings.address:
        return "this run can't start a Ray of its own; cluster.address joins one that runs"
    advice = "`ray status` says whether it runs, and a token that it asks for is read from ~/.ray/auth_token"
    return f"this run can't join the Ray at cluster.address {settings.address} ({advice})"


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """Restores the handlers of the signals that Ray handles itself."""
    handlers = {number: signal.getsignal(number) for number in _HANDLED}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)


def _nodes() -> tuple[Node, ...]:
    """The nodes that Ray knows. If some have accelerators, the others have no device."""
    facts = [node for node in ray.nodes() if node["Alive"]]
    facts.sort(key=_order)
    has_accelerators = any(node["Resources"].get("GPU") for node in facts)
    nodes: list[Node] = []
    for node in facts:
        num_devices = int(node["Resources"].get("GPU" if has_accelerators else "CPU", 0))
        accelerator = "cuda" if has_accelerators and num_devices else ""
        address = node["NodeManagerAddress"]
        name = node["NodeName"] if node["NodeName"] != address else node["NodeManagerHostname"]
        nodes.append(Node(num_devices, accelerator, name, address, node["NodeID"]))
    return with_own_names(nodes)


def _order(node: Mapping[str, Any]) -> tuple[bool, Any, str]:
    is_head = "node:__internal_head__" in node["Resources"]
    return not is_head, ipaddress.ip_address(node["NodeManagerAddress"]), node["NodeID"]
