"""Waits for the nodes that an autoscaler of Ray adds. This module doesn't import ray."""

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from turnwise.errors import DeadlineError, MissingDeviceError

logger = logging.getLogger(__name__)
T = TypeVar("T")

REPORT_S = 10.0
"""Seconds between two reports of what a start waits for."""
LOOK_S = 0.5
"""Seconds between two looks for it."""
_GROUP = "ray.io/node-group"
"""The label of the nodes of a cluster that has an autoscaler of the second version."""


def has_autoscaler(nodes: Iterable[Mapping[str, Any]], status: bytes | None) -> bool:
    """Whether an autoscaler adds nodes to a Ray, which doesn't say so itself. `nodes` are those that it
    knows, and `status` is what its monitor says of them, a JSON object, if anything.

    The second version labels nodes with their group. The first tells the kinds of nodes in its status. Every
    Ray has a monitor that tells such kinds: without an autoscaler each node is a kind of its own."""
    nodes = list(nodes)
    if any(node.get("Labels", {}).get(_GROUP) for node in nodes):
        return True
    report = json.loads(status or "{}").get("autoscaler_report") or {}
    own_kinds = {f"node_{node['NodeID']}" for node in nodes}
    kinds = {*report.get("active_nodes", {}), *report.get("pending_launches", {})}
    # Nodes whose provider tells them by an id that Ray doesn't know are in this alone.
    kinds.update((report.get("node_type_mapping") or {}).values())
    return not kinds <= own_kinds


def bundles_of(num_devices: int, num_per_node: int | None, kind: str) -> list[dict[str, float]]:
    """The resources of Ray that hold so many devices of a kind (`GPU`, `CPU`), each on one node.

    >>> bundles_of(3, None, "CPU")
    [{'CPU': 1.0}, {'CPU': 1.0}, {'CPU': 1.0}]
    >>> bundles_of(10, 8, "GPU")
    [{'GPU': 8.0}, {'GPU': 8.0}]
    """
    size = num_per_node or 1
    return [{kind: float(size)} for _ in range(-(-num_devices // size))]


def described(bundles: Sequence[Mapping[str, float]]) -> str:
    """Bundles in a few words.

    >>> described([{"GPU": 8.0}, {"GPU": 8.0}])
    '2 × 8 GPU'
    """
    numbers = Counter(amounts(bundle) for bundle in bundles)
    return ", ".join(f"{number} × {text}" for text, number in numbers.items())


def amounts(resources: Mapping[str, float]) -> str:
    """Resources of Ray in a few words.

    >>> amounts({"GPU": 8.0, "CPU": 0.5})
    '8 GPU, 0.5 CPU'
    """
    return ", ".join(f"{amount:g} {kind}" for kind, amount in resources.items())


def wait_for_nodes(
    attempt: Callable[[], T],
    asked: str,
    free: Callable[[], str],
    start_s: float | None,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], object] = time.sleep,
) -> T:
    """The result of `attempt`, which is repeated as long as it raises MissingDeviceError. Says every few
    seconds what was `asked` for and what is `free`. Raises DeadlineError after `start_s` seconds (None = no
    limit)."""
    end = clock() + (float("inf") if start_s is None else start_s)
    report = clock() + REPORT_S
    while True:
        try:
            return attempt()
        except MissingDeviceError as error:
            if clock() >= end:
                raise DeadlineError(
                    f"the run waited {start_s:g} s for Ray's autoscaler, which was asked for {asked}: "
                    f"{error}, let the autoscaler add more, or raise deadlines.start_s"
                ) from error
        if clock() >= report:
            report = clock() + REPORT_S
            logger.info("waiting for Ray's autoscaler to add nodes for %s; free are %s", asked, free())
        pause(LOOK_S)
