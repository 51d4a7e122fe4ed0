"""No key is dead: each is read by a named module, or setting it is answered with an error or a sentence."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from turnwise.config import AgenticConfig, SFTConfig, ineffective, parse_config, unavailable
from turnwise.errors import ConfigError

PACKAGE = Path(__file__).resolve().parents[3] / "turnwise"
Kind = type[AgenticConfig] | type[SFTConfig]
Leaf = tuple[str | int, ...]

TRAINING = "learning_rate weight_decay warmup_steps warmup_ratio lr_scheduler_type adam_beta1 adam_beta2"
SHARED = (
    "seed output_dir exp_name logging_dir save_steps logging_steps max_ckpt_to_keep track_with tracker_kwargs max_grad_norm"
)
READ_BY: dict[Kind, list[tuple[str, str, str]]] = {
    AgenticConfig: [
        ("pipelines/build.py", "", f"{SHARED} adv_estimator ppo_epochs deterministic target_kl kl_horizon init_kl_coef"),
        ("pipelines/build.py", "checkpoint_config", "output_dir"),
        ("pipelines/build.py", "actor_train.training_args", f"per_device_train_batch_size {TRAINING}"),
        ("pipelines/build.py", "reference.training_args", "per_device_train_batch_size"),
        ("pipelines/build.py", "actor_train.model_args", "disable_gradient_checkpointing dtype"),
        ("pipelines/build.py", "reference.model_args", "model_name_or_path dtype attn_implementation"),
        ("pipelines/build.py", "actor_train", "use_dynamic_batching_in_train max_tokens_per_microbatch_in_train"),
        ("pipelines/build.py", "actor_train reference", "use_dynamic_batching_in_infer max_tokens_per_microbatch_in_infer"),
        ("pipelines/build_rollouts.py", "", "sequence_length"),
        ("pipelines/build_rollouts.py", "actor_train.model_args", "model_name_or_path attn_implementation"),
        ("pipelines/build_rollouts.py", "actor_train", "device_mapping"),
        ("config/effects.py", "actor_infer reference", "device_mapping"),
        ("pipelines/build_rollouts.py", "actor_infer.model_args", "dtype"),
        ("pipelines/build_rollouts.py", "actor_infer.strategy_args", "strategy_name strategy_config"),
        ("pipelines/build_rollouts.py", "val_env_manager.generating_args", "do_sample"),
        (
            "pipelines/build_rollouts.py",
            "actor_infer.generating_args train_env_manager.generating_args val_env_manager.generating_args",
            "temperature top_p top_k repetition_penalty stop_strings",
        ),
        (
            "pipelines/build_rollouts.py",
            "train_env_manager val_env_manager",
            "num_env_groups group_size tags num_groups_partition max_env_retries env_step_timeout_s episode_timeout_s "
            "max_failed_fraction",
        ),
        (
            "pipelines/build_rollouts.py",
            "custom_envs.Lake",
            "env_type env_config max_steps agent_name agent_system_template agent_template action_pattern",
        ),
        ("pipelines/build_rollouts.py", "deadlines", "request_s"),
        ("pipelines/agentic.py", "", "max_steps eval_steps rollout_batch_size val_batch_size use_rollout_log_probs"),
        ("pipelines/agentic.py", "actor_train", "model_update_frequency"),
        ("algorithms", "", "loss_agg_mode entropy_loss_coef pg_args add_token_level_kl kl_penalty"),
        ("algorithms", "", "use_kl_loss kl_loss_coef kl_loss_type whiten_advantages advantage_clip reward_clip"),
        ("algorithms", "reward_normalization", "grouping method norm_mean_type norm_std_type"),
        ("config/resolve.py", "", "pretrain pg_clip use_pg_clip_range pg_clip_low pg_clip_high dual_clip_loss"),
        ("config/resolve.py", "", "prompt_length response_length"),
        ("config/roles.py", "actor_train.training_args", "gradient_accumulation_steps"),
        ("config/schema.py", "custom_envs.Lake", "max_tokens_per_step"),
        (
            "config/schema.py",
            "actor_infer.generating_args train_env_manager.generating_args val_env_manager.generating_args",
            "max_new_tokens",
        ),
    ],
    SFTConfig: [
        ("pipelines/build.py", "", f"{SHARED} train_files val_files num_epochs max_steps deterministic sequence_length"),
        ("pipelines/build.py", "", "use_dynamic_batching_in_train max_tokens_per_microbatch_in_train"),
        ("pipelines/build.py", "checkpoint_config", "output_dir"),
        ("pipelines/build.py", "model_args", "model_name_or_path dtype attn_implementation disable_gradient_checkpointing"),
        ("pipelines/build.py", "training_args", f"per_device_train_batch_size {TRAINING}"),
        ("pipelines/sft.py", "", "eval_steps"),
        ("config/sft.py", "", "pretrain"),
        ("config/sft.py", "training_args", "gradient_accumulation_steps"),
    ],
}
"""`(module or room, sections, keys)`: who reads what of a config that this version can run."""

LAKE = {"env_type": "frozen_lake"}
MINIMAL = {"pretrain": "models/none", "custom_envs": {"Lake": LAKE, "Sea": LAKE}}
DYNAMIC = {"use_dynamic_batching_in_infer": True}
BASES: dict[Kind, list[dict[str, Any]]] = {
    AgenticConfig: [
        MINIMAL,
        MINIMAL
        | {"use_kl_loss": True, "add_token_level_kl": True, "init_kl_coef": 0.1, "target_kl": 0.1, "eval_steps": 1}
        | {"use_pg_clip_range": True, "pg_clip_low": 0.1, "pg_clip_high": 0.3, "prompt_length": 64, "response_length": 64}
        | {"actor_train": DYNAMIC | {"use_dynamic_batching_in_train": True}, "reference": DYNAMIC | {"device_mapping": [0]}},
        MINIMAL | {"use_kl_loss": True, "actor_train": {"device_mapping": [2]}},
    ],
    SFTConfig: [
        {"pretrain": "models/none", "train_files": "demos.jsonl"},
        {"pretrain": "models/none", "train_files": "demos.jsonl", "val_files": "val.jsonl"},
    ],
}
"""Configs that between them use every key that can be used."""

VALUES: dict[str, Any] = {
    "rollout_batch_size": 16,
    "adv_estimator": "mine:Credit",
    "pg_variant": "gspo",
    "ratio_type": "segment",
    "pg_args": {"clip_low": 0.15},
    "group_filter": "non_zero_variance",
    "track_with": ["stdout"],
    "tracker_kwargs": {"log_dir": "elsewhere"},
    "agent_name": "mine:Agent",
    "env_type": "mine:Env",
    "tags": ["Sea"],
    "num_groups_partition": [5, 3],
    "device_mapping": [2],
    "method": "mean",
    "kl_loss_type": "k2",
    "ratio_low": 0.25,
    "temperature": 0.5,
    "default_agent": "tool_agent",
    "actor_train.strategy_args.strategy_name": "fsdp2_train",
    "actor_infer.strategy_args.strategy_name": "hf",
    "critic.strategy_args.strategy_name": "fsdp2_train",
    "reference.strategy_args.strategy_name": "fsdp2_infer",
    "reward.strategy_args.strategy_name": "fsdp2_infer",
    "strategy_args.strategy_name": "fsdp2_train",
}
"""Other values than their defaults of the keys for which `PLAIN` has none that makes sense, by name or dotted name."""
CONSTANTS = ("type", "num_return_sequences")
"""Keys of the published vocabulary that have one value only."""
PLAIN: tuple[Any, ...] = (True, False, 2, 3, 0.5, 0.25, "other", ["other"], {"other": 1})


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from models_in(argument)


def leaves(section: type[BaseModel], prefix: Leaf = ()) -> Iterator[tuple[Leaf, FieldInfo]]:
    """Every key that holds no section, by its path; `custom_envs` through the tag Lake, lists through their first item."""
    for name, field in section.model_fields.items():
        inner = next(models_in(field.annotation), None)
        if inner is None:
            yield (*prefix, name), field
            continue
        step = {dict: ("Lake",), list: (0,)}.get(get_origin(field.annotation), ())
        yield from leaves(inner, (*prefix, name, *step))


@cache
def readers(kind: Kind) -> dict[str, str]:
    """Dotted key → who reads it."""
    found: dict[str, str] = {}
    for reader, sections, names in READ_BY[kind]:
        for section in sections.split() or [""]:
            for name in names.split():
                key = f"{section}.{name}" if section else name
                assert key not in found, f"{key} stands twice in READ_BY"
                found[key] = reader
    return found


def other_value(key: Leaf, field: FieldInfo, current: Any) -> Any:
    """A valid value that isn't the current one; None where the key has only one."""
    for name in (".".join(str(part) for part in key), str(key[-1])):
        if name in VALUES:
            return VALUES[name]
    adapter: TypeAdapter[Any] = TypeAdapter(
        Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation, config=ConfigDict(strict=True)
    )
    literals = [
        value
        for part in (field.annotation, *get_args(field.annotation))
        if get_origin(part) is Literal
        for value in get_args(part)
    ]
    for value in (*literals, *PLAIN):
        try:
            if adapter.validate_python(value) != current:
                return value
        except ValidationError:
            continue
    return None


def current_value(config: BaseModel, key: Leaf) -> Any:
    value: Any = config
    for part in key:
        if value is None or value == []:
            return None
        value = value.__dict__[part] if isinstance(value, BaseModel) else value[part]
    return value


def with_value(base: dict[str, Any], key: Leaf, value: Any) -> dict[str, Any]:
    raw = deepcopy(base)
    place: Any = raw
    for part, following in pairwise(key):
        place = place[part] if part == 0 else place.setdefault(part, [{}] if following == 0 else {})
    place[key[-1]] = value
    return raw


def answers(kind: Kind, raw: dict[str, Any], key: Leaf) -> list[str]:
    """What setting a key is answered with: lines that begin with its name, or with that of a section around it."""
    try:
        config, _ = parse_config(raw, kind)
        lines = [*ineffective(config), *unavailable(config)]
    except ConfigError as error:
        lines = [line.strip() for line in str(error).splitlines()]
    names = [".".join(str(part) for part in key[:length]) for length in range(1, len(key) + 1)]
    return [line for line in lines if line.startswith(tuple(f"{name}{end}" for name in names for end in (":", " ")))]


ALL = [(kind, key, field) for kind in (AgenticConfig, SFTConfig) for key, field in leaves(kind)]


@pytest.mark.parametrize(
    ("kind", "key", "field"), ALL, ids=[f"{kind.__name__}-{'.'.join(map(str, key))}" for kind, key, _ in ALL]
)
def test_every_key_is_read_or_answered(kind: Kind, key: Leaf, field: FieldInfo) -> None:
    said = []
    for base in BASES[kind]:
        value = other_value(key, field, current_value(parse_config(base, kind)[0], key))
        if value is None:
            assert key[-1] in CONSTANTS
            return
        said.append(answers(kind, with_value(base, key, value), key))
    reader = readers(kind).get(".".join(str(part) for part in key))
    if reader is None:
        assert all(said), f"nothing reads this key and setting it to {value!r} is not answered"
    else:
        assert not all(said), f"READ_BY says that {reader} reads this key, but it is always answered: {said}"


@pytest.mark.parametrize("kind", READ_BY, ids=lambda kind: kind.__name__)
def test_the_readers_read(kind: Kind) -> None:
    keys = {".".join(str(part) for part in key) for key, _ in leaves(kind)}
    assert readers(kind).keys() - keys == set(), "READ_BY names keys that the schema doesn't have"
    for key, reader in readers(kind).items():
        path = PACKAGE / reader
        sources = "".join(file.read_text(encoding="utf-8") for file in (path.rglob("*.py") if path.is_dir() else [path]))
        assert re.search(rf"\.{key.rpartition('.')[2]}\b", sources), f"{reader} doesn't read {key}"
