"""What parameters of an action need in order to have an effect."""

from collections.abc import Iterable

from turnwise.config.checks.rules.rule import Requirement
from turnwise.rl_tool.parameters import Action, Evaluate, P, Train

_TRAIN: tuple[Requirement[Train], ...] = (
    Requirement(
        ("reward_type",),
        needs=lambda action: not action.custom_reward,
        reason="custom_reward is in its place",
    ),
    Requirement(
        ("checker",),
        needs=lambda action: not action.custom_reward,
        reason="custom_reward compares the answers",
    ),
    Requirement(
        (
            "num_generations",
            "kl_coef",
            "clip_range",
            "max_new_tokens",
            "temperature",
            "reward_type",
            "reward_config",
            "custom_reward",
            "checker",
        ),
        needs=lambda action: action.algorithm != "sft",
        reason="sft trains on demonstrations and samples no answers",
    ),
    Requirement(
        ("critic_learning_rate",),
        needs=lambda action: action.algorithm != "sft",
        reason="sft has no value model",
    ),
    Requirement(
        ("critic_learning_rate",),
        needs=lambda action: action.algorithm != "grpo",
        reason="grpo has no value model",
    ),
    Requirement(
        ("lora_rank", "lora_alpha", "lora_target_modules"),
        needs=lambda action: action.use_lora,
        reason="use_lora is false",
    ),
    Requirement(
        ("wandb_project",),
        needs=lambda action: action.use_wandb,
        reason="use_wandb is false",
    ),
)
_EVALUATE: tuple[Requirement[Evaluate], ...] = (
    Requirement(
        ("temperature",),
        needs=lambda action: action.k != 1,
        reason="k is 1, and one answer is greedy",
    ),
)


def without_effect(action: Action) -> list[str]:
    """The given parameters that nothing reads, each with the reason."""
    if isinstance(action, Train):
        return _sentences(_TRAIN, action)
    if isinstance(action, Evaluate):
        return _sentences(_EVALUATE, action)
    return []


def _sentences(requirements: Iterable[Requirement[P]], action: P) -> list[str]:
    """A sentence for each given parameter. Of several reasons the last holds."""
    reasons: dict[str, str] = {}
    for requirement in requirements:
        if not requirement.needs(action):
            reasons.update(dict.fromkeys(requirement.keys, requirement.reason))
    return [f"{name}: {reason}" for name, reason in reasons.items() if name in action.model_fields_set]
