"""Asks the autoscaler of a Ray for devices."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import ray
from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
from ray.experimental.internal_kv import _internal_kv_get
from ray.util.placement_group import placement_group, remove_placement_group

from turnwise.cluster.growing import amounts, has_autoscaler


def may_grow() -> bool:
    """Whether an autoscaler adds nodes to the Ray that this process has joined."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return has_autoscaler(nodes, _internal_kv_get(DEBUG_AUTOSCALING_STATUS))


@contextmanager
def asking_for(bundles: Sequence[Mapping[str, float]]) -> Iterator[None]:
    """Asks for these resources meanwhile, by a reservation: an autoscaler starts what one lacks. A request of
    the autoscaler's own would replace those of all other programs."""
    reservation = placement_group([dict(bundle) for bundle in bundles], strategy="PACK")
    try:
        yield
    finally:
        remove_placement_group(reservation)


def free_amounts() -> str:
    """What is free on all nodes."""
    free = ray.available_resources()
    return amounts({kind: free.get(kind, 0.0) for kind in ("GPU", "CPU")})
