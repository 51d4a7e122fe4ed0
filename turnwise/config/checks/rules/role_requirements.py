"""What the keys of a role need in order to have an effect."""

from turnwise.config.checks.rules.rule import Requirement
from turnwise.config.schema.model_args import PlacedModel, Role

TRAINED: tuple[Requirement[PlacedModel], ...] = (
    Requirement(
        ("model_args.lora_alpha", "model_args.lora_dropout", "model_args.lora_target"),
        needs=lambda c: c.model_args.lora_rank,
        reason="needs lora_rank",
    ),
    Requirement(
        ("training_args.warmup_ratio",),
        needs=lambda c: not c.training_args.warmup_steps,
        reason="warmup_steps is set",
    ),
)
"""Keys of every trained model."""

_TRAINED_BY_REINFORCEMENT: tuple[Requirement[Role], ...] = (
    *TRAINED,
    Requirement(
        ("max_tokens_per_microbatch_in_train",),
        needs=lambda c: c.use_dynamic_batching_in_train,
        reason="needs use_dynamic_batching_in_train: true",
    ),
)

_COMPUTING: tuple[Requirement[Role], ...] = (
    Requirement(
        ("use_sequence_packing",),
        needs=lambda c: not c.strategy_args.always_packs,
        reason="torch_train, deepspeed_train and torch_infer always pack",
    ),
    Requirement(
        ("max_tokens_per_microbatch_in_infer",),
        needs=lambda c: c.use_dynamic_batching_in_infer,
        reason="needs use_dynamic_batching_in_infer: true",
    ),
)
"""Keys of every role with forward passes."""

_UNTRAINED: tuple[Requirement[Role], ...] = (
    Requirement(
        ("training_args.per_device_train_batch_size",),
        needs=lambda c: not c.use_dynamic_batching_in_infer,
        reason="use_dynamic_batching_in_infer fills micro-batches by tokens",
    ),
)

_TRAINED_ROLE = (*_TRAINED_BY_REINFORCEMENT, *_COMPUTING)
_FROZEN_ROLE = (*_COMPUTING, *_UNTRAINED)
OF_ROLE: dict[str, tuple[Requirement[Role], ...]] = {
    "actor_train": _TRAINED_ROLE,
    "critic": _TRAINED_ROLE,
    "reference": _FROZEN_ROLE,
    "reward": _FROZEN_ROLE,
}
"""Role → requirements for those of its keys that have an effect only in some configs."""
