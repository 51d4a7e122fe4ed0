"""What the keys about Ray need in order to have an effect."""

from turnwise.config.checks.rules.rule import Requirement
from turnwise.config.demand import AnyConfig, ray_reason
from turnwise.runtime.machine import ray_sign

WITHOUT_RAY = "the run doesn't use Ray (cluster.name: ray, or cluster.address)"


def may_use_ray(config: AnyConfig) -> bool:
    """Whether a run of this config uses Ray, as far as its keys and this process's environment say."""
    if config.cluster.name == "auto" and ray_sign():
        return True
    return bool(ray_reason(config))


OF_CLUSTER: tuple[Requirement[AnyConfig], ...] = (
    Requirement(
        ("cluster.address",),
        needs=lambda c: c.cluster.name in ("auto", "ray"),
        reason="cluster.name chooses other processes than those of Ray",
    ),
    Requirement(("cluster.interface", "cluster.runtime_env"), needs=may_use_ray, reason=WITHOUT_RAY),
)
