"""Makes the algorithm that a config names, built in or a user's own. Imports torch."""

from dataclasses import fields
from typing import Any

from turnwise.algorithms.kl import KLController
from turnwise.algorithms.settings import (
    AlgorithmSettings,
    Correction,
    ImportanceWeight,
    RatioBand,
    RewardNormalization,
)
from turnwise.config import AgenticConfig
from turnwise.errors import ConfigError
from turnwise.protocols import Algorithm, StreamsStep
from turnwise.runtime.entry_points import load_class
from turnwise.runtime.foreign import Foreign
from turnwise.spec import ESTIMATORS


def make_algorithm(config: AgenticConfig, kl_ctrl: KLController | None = None) -> Algorithm:
    """The algorithm that `adv_estimator` names. Raises TurnwiseError if it can't be made, or lacks what the
    config needs."""
    kl_ctrl = kl_ctrl or KLController(config.init_kl_coef, config.target_kl, config.kl_horizon)
    name = config.adv_estimator
    found = load_class(ESTIMATORS[name].entry if name in ESTIMATORS else name, "adv_estimator", ConfigError)
    with Foreign(f"adv_estimator {name}: making it", "at the start", are_faults=True):
        algorithm: Algorithm = found(algorithm_settings(config), kl_ctrl)
    lacking = [part for part in (*Algorithm.__annotations__, "credit") if not hasattr(algorithm, part)]
    if lacking:
        raise ConfigError(
            f"adv_estimator {name} has no {', '.join(lacking)}; see Algorithm in "
            "turnwise/protocols/training.py"
        )
    if ("values" in algorithm.needs) != (algorithm.value_loss is not None):
        raise ConfigError(
            f"adv_estimator {name} needs {', '.join(sorted(algorithm.needs)) or 'nothing'}, and its "
            f"value_loss is {algorithm.value_loss}; a critic gives the values and value_loss trains it: have "
            "both, or neither"
        )
    whole = (
        "trains a critic" if algorithm.value_loss else "keeps running statistics" if algorithm.running else ""
    )
    if config.is_streamed and (whole or not isinstance(algorithm.loss, StreamsStep)):
        reason = (
            whole
            or f"has a loss, {type(algorithm.loss).__name__}, without the methods divisor and whole "
            f"(protocols.StreamsStep)"
        )
        raise ConfigError(
            f"stream_training: true trains on a step's groups as they end, but {name} {reason}; leave it out"
        )
    return algorithm


def algorithm_settings(config: AgenticConfig) -> AlgorithmSettings:
    """The algorithm's settings, from the config's keys of the same names. If a user's own class is the
    estimator, the keys of `reward_normalization` that the config doesn't set are left None, and the class
    decides their defaults."""
    is_built_in = config.adv_estimator in ESTIMATORS
    normalization = {
        f.name: getattr(config.reward_normalization, f.name)
        for f in fields(RewardNormalization)
        if is_built_in or config.is_set(f"reward_normalization.{f.name}")
    }
    nested: dict[str, Any] = {
        "train_infer_correction": correction_settings(config),
        "reward_normalization": RewardNormalization(**normalization),
    }
    values = {f.name: getattr(config, f.name) for f in fields(AlgorithmSettings) if f.name not in nested}
    return AlgorithmSettings(**values, **nested)


def correction_settings(config: AgenticConfig) -> Correction:
    """The enabled weights and filters of `train_infer_correction`."""
    asked = config.train_infer_correction
    if asked is None:
        return Correction()
    weight = asked.is_weight
    return Correction(
        ImportanceWeight(weight.weight_type, weight.upper_bound)
        if weight is not None and weight.enabled
        else None,
        tuple(
            RatioBand(band.agg_type, band.ratio_low, band.ratio_high)
            for band in asked.filters
            if band.enabled
        ),
    )
