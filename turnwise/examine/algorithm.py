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
    entry = ESTIMATORS[name].entry if name in ESTIMATORS else name
    make = load_class(entry, "adv_estimator", ConfigError)
    with Foreign(f"adv_estimator {name}: making it", "at the start", are_faults=True):
        algorithm: Algorithm = make(algorithm_settings(config), kl_ctrl)
    parts = [*Algorithm.__annotations__, "credit"]
    lacking = [part for part in parts if not hasattr(algorithm, part)]
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
    if config.is_streamed:
        obstacle = _streaming_obstacle(algorithm)
        if obstacle:
            raise ConfigError(
                f"stream_training: true trains on a step's groups as they end, but {name} {obstacle}; remove "
                "it"
            )
    return algorithm


def _streaming_obstacle(algorithm: Algorithm) -> str:
    """Why the algorithm needs all groups of a step at once; empty if it doesn't."""
    if algorithm.value_loss:
        return "trains a critic"
    if algorithm.running:
        return "keeps running statistics"
    if isinstance(algorithm.loss, StreamsStep):
        return ""
    loss = type(algorithm.loss).__name__
    return f"has a loss, {loss}, without the methods divisor and whole (protocols.StreamsStep)"


def algorithm_settings(config: AgenticConfig) -> AlgorithmSettings:
    """The algorithm's settings, from the config's keys of the same names. If a user's own class is the
    estimator, the keys of `reward_normalization` that the config doesn't set are left None, and the class
    decides their defaults."""
    is_built_in = config.adv_estimator in ESTIMATORS
    names = [field.name for field in fields(RewardNormalization)]
    if not is_built_in:
        names = [name for name in names if config.is_set(f"reward_normalization.{name}")]
    normalization = {name: getattr(config.reward_normalization, name) for name in names}
    nested: dict[str, Any] = {
        "train_infer_correction": correction_settings(config),
        "reward_normalization": RewardNormalization(**normalization),
    }
    plain = [field.name for field in fields(AlgorithmSettings) if field.name not in nested]
    values = {name: getattr(config, name) for name in plain}
    return AlgorithmSettings(**values, **nested)


def correction_settings(config: AgenticConfig) -> Correction:
    """The enabled weights and filters of `train_infer_correction`."""
    correction = config.train_infer_correction
    if correction is None:
        return Correction()
    importance: ImportanceWeight | None = None
    weight = correction.is_weight
    if weight is not None and weight.enabled:
        importance = ImportanceWeight(weight.weight_type, weight.upper_bound)
    enabled = [band for band in correction.filters if band.enabled]
    bands = tuple(RatioBand(band.agg_type, band.ratio_low, band.ratio_high) for band in enabled)
    return Correction(importance, bands)
