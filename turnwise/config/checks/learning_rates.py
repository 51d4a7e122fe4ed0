"""Finds learning rates outside the range in which models of that size are trained."""

from collections.abc import Collection, Iterator
from typing import NamedTuple

from turnwise.config.problems import Path, Problem
from turnwise.config.schema.agentic import AgenticConfig
from turnwise.config.schema.model_args import ModelArgs, TrainingArgs
from turnwise.config.schema.sft import SFTConfig
from turnwise.spec.package_tables import read_table

TABLE = read_table(__file__, "learning_rates.yaml")


class Range(NamedTuple):
    """Usual learning rates of a kind of training."""

    low: float
    high: float
    of: str
    """What they are usual for, in words."""


def unusual_rates(config: AgenticConfig | SFTConfig, idle: Collection[Path]) -> Iterator[Problem]:
    """A problem for each learning rate outside the usual range, set or default. Those in `idle` have no
    effect."""
    for path, training, model in _trained(config):
        here = (*path, "learning_rate")
        rate = training.learning_rate
        if here in idle:
            continue
        usual = usual_range(model)
        if usual.low <= rate <= usual.high:
            continue
        effect = "the weights hardly move"
        if rate > usual.high:
            effect = "one update can break the model"
        text = f"{rate:g}"
        if not training.is_set("learning_rate"):
            text += ", the default,"
        yield Problem(here, f"{text} is far from the usual {usual.of}: {effect}.")


def usual_range(model: ModelArgs) -> Range:
    """The usual learning rates for a model, by its size and whether a LoRA adapter is trained."""
    shape = model.shape
    if shape is None:
        row = TABLE["unknown"]
        return Range(row["low"], row["high"], "1e-6 to 1e-4, and up to 3e-3 for tiny models")
    rows = TABLE["full"]
    kind = "models"
    if model.has_adapter:
        rows = TABLE["lora"]
        kind = "LoRA adapters of models"
    row = next(row for row in rows if shape.num_parameters < row.get("below_parameters", float("inf")))
    low = row["low"]
    high = row["high"]
    return Range(low, high, f"{low:g} to {high:g} for {kind} of {row['size']}")


def _trained(config: AgenticConfig | SFTConfig) -> Iterator[tuple[Path, TrainingArgs, ModelArgs]]:
    if isinstance(config, SFTConfig):
        yield ("training_args",), config.training_args, config.model_args
        return
    for name in ("actor_train", "critic"):
        if name in config.active_roles:
            role = config.roles[name]
            yield (name, "training_args"), role.training_args, role.model_args
