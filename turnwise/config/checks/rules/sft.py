"""Rules of supervised fine-tuning."""

from turnwise.config.checks.rules.cluster import OF_CLUSTER
from turnwise.config.checks.rules.play import WRITES_NO_TEXT
from turnwise.config.checks.rules.role_requirements import TRAINED
from turnwise.config.checks.rules.rule import Requirement, Rule
from turnwise.config.schema.sft import SFTConfig

SFT_RULES: tuple[Rule[SFTConfig], ...] = (
    Rule(
        "model_args.model_type",
        when=lambda c: c.model_args.model_type != "causal_lm",
        says=lambda c: WRITES_NO_TEXT,
    ),
    Rule(
        "train_files",
        when=lambda c: not c.train_files,
        says=lambda c: "[] leaves nothing to train on; name JSONL files of messages",
    ),
    Rule(
        "eval_steps",
        when=lambda c: c.eval_steps and not c.val_files,
        says=lambda c: f"{c.eval_steps} asks for a validation loss, but there are no val_files",
    ),
    Rule(
        "save_best",
        when=lambda c: c.save_best and not c.uses_validation,
        says=lambda c: (
            "metric, mode act on the validation loss; set eval_steps and val_files, or remove this"
        ),
    ),
    Rule(
        "early_stopping",
        when=lambda c: c.early_stopping and not c.uses_validation,
        says=lambda c: (
            "metric, mode, patience, min_delta act on the validation loss; set eval_steps and val_files, or "
            "remove this"
        ),
    ),
)

SFT_REQUIREMENTS: tuple[Requirement[SFTConfig], ...] = (
    *TRAINED,
    *OF_CLUSTER,
    Requirement(
        ("max_tokens_per_microbatch_in_train",),
        needs=lambda c: c.use_dynamic_batching_in_train or c.val_files,
        reason="needs use_dynamic_batching_in_train: true",
    ),
)
