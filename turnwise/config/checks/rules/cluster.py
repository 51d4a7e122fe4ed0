"""What the keys about Ray need in order to have an effect."""

from turnwise.config.checks.rules.rule import Requirement
from turnwise.config.demand import AnyConfig, ray_reason
from turnwise.config.schema.agentic import AgenticConfig
from turnwise.config.schema.sft import SFTConfig
from turnwise.runtime.machine import ray_sign

WITHOUT_RAY = "the run doesn't use Ray (cluster.name: ray, or cluster.address)"


def may_use_ray(config: AnyConfig) -> bool:
    """Whether a run of this config uses Ray, as far as its keys and this process's environment say."""
    if config.cluster.name == "auto" and ray_sign():
        return True
    return bool(ray_reason(config))


def _writes_shares(config: AnyConfig) -> bool:
    """Whether a trained role writes checkpoints by shares."""
    sections = [config.strategy_args] if isinstance(config, SFTConfig) else []
    if isinstance(config, AgenticConfig):
        sections = [role.strategy_args for role in config.active_roles.values()]
    return any(section.spec.writes_shares for section in sections)


OF_CLUSTER: tuple[Requirement[AnyConfig], ...] = (
    Requirement(
        ("cluster.address",),
        needs=lambda c: c.cluster.name in ("auto", "ray"),
        reason="cluster.name chooses other processes than those of Ray",
    ),
    Requirement(
        ("checkpoint_config.save_hf_model",),
        needs=_writes_shares,
        reason="checkpoints of this strategy have a plain Hugging Face folder anyway",
    ),
    Requirement(("cluster.interface", "cluster.runtime_env"), needs=may_use_ray, reason=WITHOUT_RAY),
)
