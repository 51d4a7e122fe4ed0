"""`SFTConfig`: all settings of supervised fine-tuning on demonstrations."""

from typing import ClassVar, Self

from pydantic import Field, model_validator

from turnwise.config.schema.model_args import PlacedModel
from turnwise.config.schema.model_shape import ModelShape
from turnwise.config.schema.resolve import resolve_model, resolve_sequence_length, tokens_of_microbatch
from turnwise.config.schema.row_shape import RowShape
from turnwise.config.schema.running import RunKeys
from turnwise.config.schema.section import Names, Positive, PositiveCount


class SFTConfig(PlacedModel, RunKeys):
    """One YAML of `turnwise sft`, which trains on files of conversations, with the loss on the assistant's
    messages only."""

    train_files: Names
    """Rows `{"messages": [...]}`: JSON, CSV or Parquet files, folders saved by the datasets library, or names
    on the hub."""
    val_files: Names | None = None
    """Rows in the same forms, on which the loss is measured every eval_steps and at the end."""
    data: RowShape = Field(default_factory=RowShape)
    num_epochs: PositiveCount = 1
    """Passes over the data."""
    max_steps: PositiveCount | None = None
    """Maximum optimiser steps [those of num_epochs]."""
    max_grad_norm: Positive = 1.0
    """Gradients are clipped to this norm."""
    use_dynamic_batching_in_train: bool = True
    """Fill micro-batches by tokens instead of by samples. Changes speed and memory, not the result."""
    plays_ahead: ClassVar[bool] = False

    @model_validator(mode="after")
    def _resolve(self) -> Self:
        resolve_model(self.model_args, self.pretrain, "causal_lm", "fp32")
        self.training_args.fill(learning_rate=1e-5)
        self.strategy_args.fill(strategy_name="torch_train")
        resolve_sequence_length(self, self.model_args)
        self.fill(max_tokens_per_microbatch_in_train=tokens_of_microbatch(self.sequence_length))
        for section in filter(None, (self.save_best, self.early_stopping)):
            section.fill(metric="sft/val_loss", mode="min")
        return self

    @property
    def uses_validation(self) -> bool:
        return self.eval_steps > 0 and bool(self.val_files)

    def model_shape(self) -> ModelShape | None:
        """The model's sizes; None if they can't be read."""
        return self.model_args.shape
