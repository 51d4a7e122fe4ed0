"""Finds contradictions and impossible sizes before a model is loaded. Beside the rules are the checks that no
single `Rule` can state."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from turnwise.config.checks.abilities import lacking_abilities
from turnwise.config.checks.play_checks import (
    environment_problems,
    reward_problems,
    room_problems,
    size_problems,
    state_problems,
)
from turnwise.config.checks.role_checks import cache_problems, placed_model_problems, role_problems
from turnwise.config.checks.rules.algorithm import ALGORITHM_RULES, SIBLING_RULES
from turnwise.config.checks.rules.lending import LENDING_RULES
from turnwise.config.checks.rules.play import PLAY_RULES
from turnwise.config.checks.rules.rule import Rule, refused
from turnwise.config.checks.rules.run import RUN_RULES
from turnwise.config.checks.rules.sft import SFT_RULES
from turnwise.config.demand import contradictions
from turnwise.config.problems import Path, Problem
from turnwise.config.schema.agentic import AgenticConfig
from turnwise.config.schema.model_args import ModelArgs
from turnwise.config.schema.resolve import streaming_obstacles
from turnwise.config.schema.sft import SFTConfig
from turnwise.errors import ModelError, nearest
from turnwise.model_files.folder import check_model
from turnwise.spec import PG_VARIANTS, TRACKERS

AGENTIC_RULES: tuple[Rule[AgenticConfig], ...] = (
    *PLAY_RULES,
    *ALGORITHM_RULES,
    *RUN_RULES,
    *LENDING_RULES,
)


def find_problems(config: AgenticConfig | SFTConfig) -> list[Problem]:
    """All problems for which the config is refused, except `sibling_problems`."""
    problems = [
        *_models(config),
        *_trackers(config),
        *_validations(config),
        *contradictions(config),
        *lacking_abilities(config),
    ]
    if isinstance(config, SFTConfig):
        problems += refused(SFT_RULES, config)
        problems += placed_model_problems("", config, ["train"])
        return problems
    problems += refused(AGENTIC_RULES, config)
    for check in AGENTIC_CHECKS:
        problems += check(config)
    return problems


def named_models(config: AgenticConfig | SFTConfig) -> Iterator[tuple[str, ModelArgs]]:
    """`(key that names the model, model)` for each model of a run. actor_infer is left out: its model is
    actor_train's."""
    if isinstance(config, SFTConfig):
        roles = {"": config.model_args}
    else:
        roles = {
            f"{name}.": role.model_args for name, role in config.active_roles.items() if name != "actor_infer"
        }
    for prefix, model in roles.items():
        is_shared = model.model_name_or_path == config.pretrain
        key = "pretrain" if is_shared else f"{prefix}model_args.model_name_or_path"
        yield key, model


def _models(config: AgenticConfig | SFTConfig) -> Iterator[Problem]:
    """Models that can't be loaded or can't hold a sequence. A missing model is no problem here: it may be
    downloaded."""
    models = list(named_models(config))
    for key, model in models:
        try:
            check_model(model.model_name_or_path, model.trust)
        except ModelError as error:
            yield Problem.at(key, str(error))
    shape = config.model_shape()
    length = config.sequence_length
    if shape and length > shape.context_length:
        _, policy = models[0]
        num_more = length - shape.context_length
        yield Problem.at(
            "sequence_length",
            f"{length} tokens are {num_more} more than the {shape.context_length} that "
            f"{policy.model_name_or_path} can hold by its config.json",
        )


def _trackers(config: AgenticConfig | SFTConfig) -> Iterator[Problem]:
    """Wrong `tracker_kwargs`. They hold arguments by tracker, or directly if only one tracker of `track_with`
    takes any. Traces in MLflow take those of the tracker mlflow."""
    used = list(config.track_with)
    if isinstance(config, AgenticConfig) and config.trace.backend == "mlflow" and "mlflow" not in used:
        used.append("mlflow")
    takers = [name for name in used if TRACKERS[name].arguments != {}]
    for key, value in config.tracker_kwargs.items():
        path = ("tracker_kwargs", key)
        if key not in TRACKERS and len(takers) == 1:
            yield from _tracker_argument(takers[0], path, value)
        elif key not in TRACKERS:
            names = " or ".join(takers) or f"no tracker of track_with ({', '.join(config.track_with)})"
            yield Problem(path, f"taken by {names}; write it under its tracker's name, or remove it")
        elif key not in used:
            yield Problem(path, f"track_with is {', '.join(config.track_with)}; add {key}, or remove this")
        elif not isinstance(value, dict):
            yield Problem(path, f"got {value!r}; the arguments of a tracker are a mapping")
        else:
            for name, argument in value.items():
                yield from _tracker_argument(key, (*path, name), argument)


def _tracker_argument(tracker: str, path: Path, value: object) -> Iterator[Problem]:
    arguments = TRACKERS[tracker].arguments
    name = str(path[-1])
    if arguments is None:
        return
    if name not in arguments:
        yield Problem(
            path, f"{tracker} takes {', '.join(arguments) or 'no arguments'}.{nearest(name, arguments)}"
        )
    elif type(value).__name__ != arguments[name]:
        yield Problem(path, f"got {value!r}; expected a {arguments[name]}")


def sibling_problems(config: AgenticConfig | SFTConfig) -> Iterator[Problem]:
    """Settings that compare siblings, if training groups have one episode. A config with such settings can
    only be played."""
    if isinstance(config, SFTConfig) or config.train_env_manager.group_size > 1:
        return
    normalization = config.reward_normalization
    estimator = config.estimator
    centres_groups = normalization.grouping == "traj_group_id" and "group" in normalization.statistics
    if estimator.compares_siblings and (estimator.normalization == "own" or centres_groups):
        message = (
            f"1 leaves every advantage of {config.adv_estimator} at 0, since it compares siblings; use at "
            "least 2"
        )
        if estimator.has_step_returns:
            message = (
                f"1 leaves {config.adv_estimator} no siblings with whose turns a turn could be compared; use "
                "at least 2"
            )
        yield Problem.at("train_env_manager.group_size", message)
    yield from refused(SIBLING_RULES, config)


def _loss(config: AgenticConfig) -> Iterator[Problem]:
    if config.pg_variant in PG_VARIANTS:
        yield from _loss_parameters(config)
    refusal = config.variant.ratio_refusal(config.pg_variant, config.ratio_type)
    if refusal:
        yield Problem.at("ratio_type", f"{config.ratio_type}: {refusal}")
    if config.train_infer_correction is None:
        return
    for index, band in enumerate(config.train_infer_correction.filters):
        if band.ratio_low >= band.ratio_high:
            path = ("train_infer_correction", "filters", index)
            yield Problem(path, f"ratio_low {band.ratio_low} isn't below ratio_high {band.ratio_high}")


def _loss_parameters(config: AgenticConfig) -> Iterator[Problem]:
    """Parameters that a built-in loss doesn't have, and values that it can't take."""
    allowed = config.variant.parameters
    for name in config.pg_args:
        if name in allowed:
            message = _wrong_parameter(name, config.pg_args)
        else:
            names = ", ".join(allowed) or "none"
            hint = nearest(name, allowed)
            message = f"pg_variant {config.pg_variant} has no such parameter (it has: {names}).{hint}"
        if message:
            yield Problem(("pg_args", name), message)


def _wrong_parameter(name: str, parameters: Mapping[str, Any]) -> str:
    """Why a built-in loss can't take the value that the parameter `name` has in `parameters`; empty if it
    can."""
    value = parameters[name]
    if name == "dual_clip" and value is None:
        return ""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= value < math.inf:
        return f"got {value!r}; expected a number that isn't negative"
    if name.startswith("tau_") and value == 0:
        return "0 isn't a temperature, since it divides the loss"
    if name == "dual_clip" and value <= 1:
        return (
            f"{value} would bound losses that no ratio has moved yet; use more than 1 (3 is usual), or "
            "dual_clip_loss: false"
        )
    if name == "fraction" and value > 1:
        return f"{value} isn't a share of the tokens; use at most 1"
    if name == "cap" and value == 0:
        return "0 takes the weight, and with it the loss, from every token"
    if name == "covariance_low" and not _wrong_parameter("covariance_high", parameters):
        high = parameters["covariance_high"]
        if value >= high:
            return f"{value} isn't below covariance_high {high}, so that no token could be chosen"
    return ""


def _streaming(config: AgenticConfig) -> Iterator[Problem]:
    if not config.is_streamed:
        return
    for obstacle in streaming_obstacles(config):
        yield Problem.at(
            "stream_training",
            f"true trains on the groups of a step as they end, but {obstacle}; remove it",
        )


def _validations(config: AgenticConfig | SFTConfig) -> Iterator[Problem]:
    """Metrics of `save_best` and `early_stopping` that no validation measures."""
    start = "val/"
    metrics = "those begin with val/, such as val/score/mean"
    if isinstance(config, SFTConfig):
        start = "sft/val_loss"
        metrics = "fine-tuning has one, sft/val_loss"
    sections = {"save_best": config.save_best, "early_stopping": config.early_stopping}
    for key, section in sections.items():
        if section is not None and not section.metric.startswith(start):
            yield Problem.at(f"{key}.metric", f"{section.metric!r} isn't a validation metric; {metrics}")


def _updates(config: AgenticConfig) -> Iterator[Problem]:
    """Refuses `save_best` if validations fall between weight updates, `deterministic` if checkpoints do or
    threads are used."""
    every = config.eval_steps
    updated = config.actor_train.model_update_frequency
    if config.save_best is not None and every % updated:
        yield Problem.at(
            "save_best",
            f"validations every eval_steps {every} play older weights than the trainer's, which are sent "
            f"every model_update_frequency {updated} steps; make eval_steps a multiple of that",
        )
    if config.deterministic and config.save_steps % updated:
        message = f"{config.save_steps} isn't a multiple of actor_train.model_update_frequency {updated}"
        yield Problem.at(
            "save_steps", f"{message}: a resumed run would sample from other weights (deterministic: true)"
        )
    for tag, env in config.custom_envs.items():
        if config.deterministic and env.use_thread_lock:
            message = "threads answer in any order, which deterministic: true forbids; remove it"
            yield Problem(("custom_envs", tag, "use_thread_lock"), message)


AGENTIC_CHECKS: tuple[Callable[[AgenticConfig], Iterator[Problem]], ...] = (
    environment_problems,
    reward_problems,
    size_problems,
    role_problems,
    cache_problems,
    _loss,
    room_problems,
    _streaming,
    _updates,
    state_problems,
)
