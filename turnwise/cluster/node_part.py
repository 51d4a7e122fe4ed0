"""What a run has of a node of Ray: its devices, its agent, and the variables of its actors."""

import os
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from turnwise.cluster.node_agent import NodeFacts, versions
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
    for name, ours in versions().items():
        theirs = facts.versions.get(name)
        if theirs != ours:
            raise WorkerError(
                f"node {node.name} has {name} {theirs}, and the run {ours}; install the same on all nodes"
            )
