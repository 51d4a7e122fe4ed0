"""Settings that act on a metric of the validations: keep the best model, end a run that no longer gets better."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from turnwise.config.problems import Problem
from turnwise.config.section import NonNegative, PositiveCount, Section

if TYPE_CHECKING:
    from turnwise.config.schema import AgenticConfig
    from turnwise.config.sft import SFTConfig


class SaveBest(Section):
    """Which model is the best."""

    metric: str = "val/score/mean"
    """Metric of the validations by which the best model is kept, in the run's folder best."""
    mode: Literal["max", "min"] = "max"
    """Whether the largest or the smallest value is the best."""


class EarlyStopping(Section):
    """When a run no longer gets better."""

    metric: str = "val/score/mean"
    """Metric of the validations that is to get better."""
    mode: Literal["max", "min"] = "max"
    """Whether larger or smaller values are better."""
    patience: PositiveCount = 5
    """Validations in a row without a better value than the best before them, after which the run ends."""
    min_delta: NonNegative = 0.0
    """A value is better where it differs from the best by more than this."""


class SFTSaveBest(SaveBest):
    """The same for fine-tuning, whose validations measure a loss."""

    metric: Literal["sft/val_loss"] = "sft/val_loss"
    """Metric of the validations by which the best model is kept, in the run's folder best."""
    mode: Literal["max", "min"] = "min"
    """Whether the largest or the smallest value is the best."""


class SFTEarlyStopping(EarlyStopping):
    """The same for fine-tuning, whose validations measure a loss."""

    metric: Literal["sft/val_loss"] = "sft/val_loss"
    """Metric of the validations that is to get better."""
    mode: Literal["max", "min"] = "min"
    """Whether larger or smaller values are better."""


def sft_validation_problems(config: SFTConfig) -> Iterator[Problem]:
    """The same for fine-tuning."""
    for key, section in (("save_best", config.save_best), ("early_stopping", config.early_stopping)):
        if section is not None and not (config.eval_steps and config.val_files):
            keys = ", ".join(type(section).model_fields)
            yield Problem.at(key, f"{keys} act on the validation loss; set eval_steps and val_files, or leave this out")


def validation_problems(config: AgenticConfig) -> Iterator[Problem]:
    """Problems of `save_best` and `early_stopping` with the validations of the config."""
    for key, section in (("save_best", config.save_best), ("early_stopping", config.early_stopping)):
        if section is None:
            continue
        if not config.uses_validation:
            keys = ", ".join(type(section).model_fields)
            yield Problem.at(key, f"{keys} say what the validations decide, and eval_steps is 0; set it, or leave this out")
        if not section.metric.startswith("val/"):
            message = f"{section.metric!r} is no metric of a validation; those begin with val/, such as val/score/mean"
            yield Problem.at(f"{key}.metric", message)
    every, updated = config.eval_steps, config.actor_train.model_update_frequency
    if config.save_best is not None and every % updated:
        yield Problem.at(
            "save_best",
            f"validations every eval_steps {every} play older weights than the trainer's, which are sent every "
            f"model_update_frequency {updated} steps; make eval_steps a multiple of that",
        )
