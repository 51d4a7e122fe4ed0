"""What a run has of a node of Ray: its devices, its agent, the variables of its actors, and its share of the
processes without a device."""

import os
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from turnwise.cluster.node_facts import NodeFacts, versions
from turnwise.cluster.ray_settings import reason_of
from turnwise.errors import WorkerError
from turnwise.runtime.machine import Node

_FORWARDED = ("TURNWISE_", "HF_", "NCCL_", "GLOO_", "VLLM_", "TOKENIZERS_", "PYTORCH_")
"""Variables that actors get from the run."""


@dataclass(frozen=True)
class NodePart:
    """What a run has of a node."""

    node: Node
    numbers: tuple[int, ...]
    """The devices that are used, as they are numbered on the node."""
    agent: Any
    facts: NodeFacts

    def beat(self) -> Future[None]:
        """Asks the node for a sign of life."""
        answer: Future[None] = self.agent.beat.remote().future()
        return answer

    def device_name(self, number: int) -> str:
        """Torch's name for a device of the node, in the actors there, which see the used ones only."""
        if not self.node.accelerator:
            return "cpu"
        return f"{self.node.accelerator}:{self.numbers.index(number)}"


class Spread:
    """Spreads processes without a device over nodes, by their cores."""

    def __init__(self) -> None:
        self._num_processes: Counter[int] = Counter()
        self._changing = threading.Lock()

    def add(self, num_cores: Mapping[int, int]) -> int:
        """Adds a process. Returns the index of its node, of which `num_cores` has the cores: the one that has
        the most for each process, with this one."""
        with self._changing:
            index = max(num_cores, key=lambda node: num_cores[node] / (self._num_processes[node] + 1))
            self._num_processes[index] += 1
        return index

    def remove(self, index: int) -> None:
        """Notes that a process of a node has ended."""
        with self._changing:
            self._num_processes[index] -= 1


def actor_environment(part: NodePart) -> dict[str, str | None]:
    """The variables of an actor: those of the run that concern it, and the devices that it sees."""
    environment: dict[str, str | None] = {
        name: value for name, value in os.environ.items() if name.startswith(_FORWARDED)
    }
    # Ray sets it to the actor's number of CPUs, which is 0 here.
    environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS")
    if part.node.accelerator:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(part.facts.devices)
    return environment


def require_versions(node: Node, facts: NodeFacts) -> None:
    """Raises WorkerError if a version differs from that of the run's process."""
    for name, ours in versions().items():
        theirs = facts.versions.get(name)
        if theirs != ours:
            raise WorkerError(
                f"node {node.name} has {name} {theirs}, and the run {ours}; install the same on all nodes"
            )


def require_paths(node: Node, missing: Sequence[str], paths: Mapping[str, str]) -> None:
    """Raises WorkerError if paths are missing on a node, which are given by their keys."""
    if not missing:
        return
    folders = ", ".join(f"{key} ({os.path.dirname(paths[key])})" for key in missing)
    raise WorkerError(
        f"node {node.name} doesn't see what this machine has at {folders}; put it on a file system that all "
        "nodes share, under the same path"
    )


def lacking_agent(node: Node, error: Exception) -> WorkerError:
    """The error of a run whose agent couldn't start on a node."""
    advice = "all nodes need the same installation of turnwise, and have to see the folder in which it starts"
    return WorkerError(f"node {node.name} can't start a process of the run: {reason_of(error)}; {advice}")


def failed_start(name: str, node: Node, error: Exception) -> WorkerError:
    """The error of a run of which a process has ended while it started."""
    reason = reason_of(error).rstrip(".")
    return WorkerError(
        f"{name} can't be started on node {node.name}: {reason}; the files of Ray on that node may say more "
        "(/tmp/ray/session_latest/logs)"
    )
