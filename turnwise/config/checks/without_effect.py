"""Finds keys whose value isn't the default and has no effect. They give warnings, or errors under
`--strict`."""

from collections.abc import Iterator

from turnwise.config.checks.rules.requirements import REQUIREMENTS
from turnwise.config.checks.rules.role_requirements import OF_ROLE
from turnwise.config.checks.rules.rule import Requirement, without_effect
from turnwise.config.checks.rules.sft import SFT_REQUIREMENTS
from turnwise.config.problems import Path, Problem, as_sentences
from turnwise.config.schema.agentic import AgenticConfig
from turnwise.config.schema.model_args import ROLES, Role
from turnwise.config.schema.resolve import published_clips
from turnwise.config.schema.sft import SFTConfig

UNREAD: dict[str, dict[str, list[str]]] = {name: role["unread"] for name, role in ROLES.items()}
"""Role → reason → keys of the role that are never read."""


def _requirements(role: str) -> tuple[Requirement[Role], ...]:
    """What the role's keys need. Keys that are never read need what never holds."""
    requirements = list(OF_ROLE.get(role, ()))
    for reason, keys in UNREAD[role].items():
        requirements.append(Requirement(tuple(keys), lambda section: False, reason))
    return tuple(requirements)


ROLE_REQUIREMENTS = {role: _requirements(role) for role in UNREAD}


def never_works(key: str) -> bool:
    """Whether a dotted key, such as `actor_infer.training_args`, is one that its role never reads."""
    role, _, inner = key.partition(".")
    return any(
        f"{inner}.".startswith(f"{name}.") for names in UNREAD.get(role, {}).values() for name in names
    )


def find_ineffective(config: AgenticConfig | SFTConfig) -> list[Problem]:
    """A problem for each key that has no effect, or defeats another key. A section without effect gets a
    single problem."""
    if isinstance(config, SFTConfig):
        return list(without_effect(SFT_REQUIREMENTS, config))
    problems = list(without_effect(REQUIREMENTS, config))
    for check in (_clip_keys, _corrections, _histories, _mean_credit, _long_warmups):
        problems += check(config)
    for name, requirements in ROLE_REQUIREMENTS.items():
        problems += without_effect(requirements, config.roles[name], name)
    paths = {problem.path for problem in problems}
    return [
        problem for problem in problems if not any(section in paths for section in _sections(problem.path))
    ]


def _sections(path: Path) -> Iterator[Path]:
    """The paths of the sections that hold a key."""
    for length in range(1, len(path)):
        yield path[:length]


def ineffective(config: AgenticConfig | SFTConfig) -> list[str]:
    """The problems of `find_ineffective` as sentences."""
    return as_sentences(find_ineffective(config))


def _clip_keys(config: AgenticConfig) -> Iterator[Problem]:
    for name, clip in published_clips(config).items():
        value = config.pg_args[name]
        if value != clip:
            message = (
                f"{value} takes the place of {clip}: the published clip key has no effect; keep one of them."
            )
            yield Problem(("pg_args", name), message)


def _corrections(config: AgenticConfig) -> Iterator[Problem]:
    correction = config.train_infer_correction
    if correction is None:
        return
    if correction.is_weight is None and not correction.filters:
        yield Problem.at("train_infer_correction", "has no effect: it names neither is_weight nor filters.")
    for index, band in enumerate(correction.filters):
        for key in ("agg_type", "ratio_low", "ratio_high"):
            if not band.enabled and band.departs(key):
                yield Problem(
                    ("train_infer_correction", "filters", index, key), "has no effect: enabled is false."
                )


def _mean_credit(config: AgenticConfig) -> Iterator[Problem]:
    """Finds estimators that give each turn its own credit, under a loss that averages advantages over several
    turns."""
    estimator = config.estimator
    granularities = config.variant.granularities
    by_sequence = granularities[:1] == ("geometric",) and config.ratio_type != "segment"
    if (
        not by_sequence
        or estimator.is_own
        or estimator.reward_placement != "turn"
        or config.reward_placement == "final"
    ):
        return
    tags = [tag for tag in config.train_env_manager.tags if tag in config.custom_envs]
    long = [
        tag
        for tag in tags
        if config.custom_envs[tag].mode == "trajectory" and config.custom_envs[tag].max_steps > 1
    ]
    if long:
        message = (
            f"{config.pg_variant} gives all tokens of a sequence the mean of their advantages, and in mode "
            f"trajectory the "
            f"turns of an episode ({', '.join(long)}) are one sequence, so the credit that "
            f"{config.adv_estimator} gives single "
            "turns is averaged away; set ratio_type: segment, or mode: step in the environment, or "
            "pg_variant: ppo."
        )
        yield Problem.at("pg_variant", message)


def _long_warmups(config: AgenticConfig) -> Iterator[Problem]:
    """Finds warm-ups that are longer than the run, so that the learning rate never reaches its peak."""
    for name in ("actor_train", "critic"):
        if name not in config.active_roles:
            continue
        training = config.roles[name].training_args
        steps = config.num_training_steps(name) * config.optimizer_steps_per_batch(name)
        if training.warmup_steps > steps > 0:
            end = training.learning_rate * steps / training.warmup_steps
            message = (
                f"{training.warmup_steps} is more than the {steps} optimiser steps of the run, so the "
                f"learning rate"
            )
            path = (name, "training_args", "warmup_steps")
            yield Problem(path, f"{message} ends at {end:.1g} and never reaches {training.learning_rate:g}.")


def _histories(config: AgenticConfig) -> Iterator[Problem]:
    for tag, env in config.custom_envs.items():
        if not env.is_set("history_length"):
            continue
        path = ("custom_envs", tag, "history_length")
        if env.mode == "trajectory":
            yield Problem(path, "has no effect: in mode trajectory the whole history is in the context.")
        elif "{history" not in env.agent_template:
            yield Problem(path, "has no effect: agent_template shows no {history}.")
