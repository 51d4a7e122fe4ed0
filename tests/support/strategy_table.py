"""What each strategy does: a cell says that it works and names its tests, or that it is refused. The table of
docs/ranks.md is made of it, and `turnwise config` is asked about every cell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ENGINES = ("torch", "fsdp2", "deepspeed", "megatron")


@dataclass(frozen=True, slots=True)
class Works:
    """`tests` are `file::function`, or a file that is a script."""

    tests: tuple[str, ...]
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Refused:
    """The key that is refused; the message says to use `instead`. With `is_missing` the config is valid, and
    what it needs is listed as missing."""

    key: str
    instead: str
    is_missing: bool = False


Cell = Works | Refused


@dataclass(frozen=True, slots=True)
class Feature:
    """A row: what is asked of a strategy. `{engine}` in `asks` is the name of the column."""

    title: str
    asks: Mapping[str, Any]
    cells: Mapping[str, Cell]
    is_sampled: bool = False
    """Whether the servers of `asks` are what is asked for."""
    others: Mapping[str, Any] = field(default_factory=dict)
    """Keys that any strategy needs for it."""


RANKS, RUNS = "tests/parity/test_ranks.py", "tests/parity/test_ranks_runs.py"
SHARDS, SHARD_RUNS = "tests/parity/test_fsdp2.py", "tests/parity/test_fsdp2_runs.py"
CONTRACT = "tests/contracts/test_strategy_contract.py"
TWO_RANKS = "tests/contracts/test_fsdp2_on_two_ranks.py"
DEEPSPEED, MEGATRON = "tests/engines/train_deepspeed.py", "tests/engines/train_megatron.py"
EXAMPLES = "tests/engines/train_examples.py"
FED_VLLM = "tests/engines/train_vllm_sharded.py"
STEPS = "::test_two_ranks_make_the_steps_of_plain_torch"
SAME_RUN = f"{SHARD_RUNS}::test_a_run_with_shards_is_one_with_whole_models"
MEGATRON_RUN = f"{MEGATRON}::test_a_run_with_megatron_is_one_with_plain_torch"
MEGATRON_STEPS = f"{MEGATRON}::test_ranks_make_the_steps_of_plain_torch"
OUR_EXAMPLE = f"{EXAMPLES}::test_an_example_trains_on_fewer_devices"
NODES = (
    "tests/extras/test_two_machines.py::test_a_run_on_two_machines_makes_the_steps_of_two_processes_of_one"
)
ENGINE_NODES = f"{EXAMPLES}::test_two_machines_train_what_two_processes_train"


def works(*tests: str, remark: str = "") -> Works:
    return Works(tests, remark)


def everywhere(name: str) -> dict[str, Cell]:
    """A test of the contract of strategies, which every engine passes."""
    contract = "tests/support/strategy_contract.py"
    test = f"{contract}::{name}"
    return {
        "torch": works(CONTRACT, test),
        "fsdp2": works(CONTRACT, TWO_RANKS, test),
        "deepspeed": works(DEEPSPEED, test),
        "megatron": works(MEGATRON, test),
    }


FEATURES = (
    Feature(
        "policy (`_train`)",
        {},
        {
            "torch": works(f"{RANKS}::test_two_ranks_make_the_steps_of_one"),
            "fsdp2": works(f"{SHARDS}{STEPS}"),
            "deepspeed": works(f"{DEEPSPEED}{STEPS}"),
            "megatron": works(MEGATRON_STEPS),
        },
    ),
    Feature(
        "critic (`_train`)",
        {"critic.strategy_args.strategy_name": "{engine}_train"},
        {
            "torch": works(f"{RANKS}::test_two_ranks_make_the_steps_of_one"),
            "fsdp2": works(f"{SHARDS}{STEPS}", SAME_RUN),
            "deepspeed": works(f"{DEEPSPEED}{STEPS}"),
            "megatron": works(MEGATRON_STEPS, MEGATRON_RUN),
        },
        others={"adv_estimator": "gae"},
    ),
    Feature(
        "frozen reference (`_infer`)",
        {"reference.strategy_args.strategy_name": "{engine}_infer"},
        {
            "torch": works("tests/unit/training/test_torch_strategy.py::test_a_reference_is_frozen"),
            "fsdp2": works(
                "tests/unit/training/test_fsdp2_strategy.py::test_a_frozen_model_gives_the_log_probs_of_torch",
                SAME_RUN,
            ),
            "deepspeed": Refused("reference.strategy_args.strategy_name", "fsdp2_infer", is_missing=True),
            "megatron": works(MEGATRON_RUN),
        },
        others={"use_kl_loss": True},
    ),
    Feature(
        "LoRA, and the policy without its adapter as reference",
        {"actor_train.model_args.lora_rank": 4},
        {
            "torch": works(
                "tests/unit/pipelines/test_lora_run.py::test_the_reference_is_the_policy_without_its_adapter"
            ),
            "fsdp2": works(f"{SHARDS}{STEPS}", SAME_RUN),
            "deepspeed": works(f"{DEEPSPEED}{STEPS}"),
            "megatron": Refused("actor_train.model_args.lora_rank", "fsdp2_train"),
        },
        others={"use_kl_loss": True},
    ),
    Feature(
        "a step in parts (`stream_training`)",
        {"stream_training": True},
        everywhere("test_parts_of_a_step_add_up_to_it")
        | {
            "deepspeed": works(
                DEEPSPEED,
                "tests/support/strategy_contract.py::test_parts_of_a_step_add_up_to_it",
                remark="without a gain",
            ),
            "megatron": works(MEGATRON_STEPS),
        },
        others={"async_generation_ratio": 1, "actor_infer.device_mapping": [2, 3]},
    ),
    Feature(
        "sequence packing",
        {"actor_train.use_sequence_packing": True},
        everywhere("test_forward_gives_float32_arrays_aligned_with_tokens"),
    ),
    Feature(
        "dynamic batching",
        {"actor_train.use_dynamic_batching_in_train": True},
        everywhere("test_micro_batches_add_up_to_the_whole_step")
        | {"megatron": works(f"{EXAMPLES}::test_a_published_file_trains", MEGATRON)},
    ),
    Feature(
        "log-probs over kept ids (`top_k`)",
        {"actor_infer.generating_args.top_k": 20},
        everywhere("test_log_probs_over_kept_ids"),
        others={"async_generation_ratio": 1, "actor_infer.device_mapping": [2, 3]},
    ),
    Feature(
        "gradient checkpointing",
        {"actor_train.model_args.disable_gradient_checkpointing": False},
        {
            "torch": works(
                "tests/parity/test_microbatch_parity.py::test_computing_activations_twice_changes_no_bit"
            ),
            "fsdp2": works(f"{SHARDS}{STEPS}"),
            "deepspeed": works(OUR_EXAMPLE),
            "megatron": works(MEGATRON_STEPS),
        },
    ),
    Feature(
        "`bf16`",
        {"actor_train.model_args.dtype": "bf16"},
        {
            "torch": works(
                "tests/unit/training/test_torch_strategy.py::test_bf16_autocast_keeps_fp32_weights_and_stays_near"
            ),
            "fsdp2": works(
                "tests/unit/training/test_fsdp2_strategy.py::test_computes_in_half_precision_and_keeps_fp32"
            ),
            "deepspeed": works(f"{DEEPSPEED}::test_computes_in_half_precision"),
            "megatron": works(f"{MEGATRON}::test_computes_in_half_precision"),
        },
    ),
    Feature(
        "`fp16`, whose loss is scaled",
        {"actor_train.model_args.dtype": "fp16"},
        {
            "torch": works(f"{RANKS}::test_fp16_scales_the_loss_alike_on_all_ranks"),
            "fsdp2": works(f"{SHARDS}::test_fp16_scales_the_loss_alike_on_all_ranks"),
            "deepspeed": works(f"{DEEPSPEED}::test_computes_in_half_precision"),
            "megatron": works(f"{MEGATRON}::test_fp16_scales_the_loss_alike_on_all_ranks"),
        },
    ),
    Feature(
        "roles on different devices",
        {"critic.strategy_args.strategy_name": "{engine}_train", "critic.device_mapping": [2, 3]},
        {
            "torch": works(f"{RANKS}::test_roles_on_other_devices_sum_among_themselves"),
            "fsdp2": works(f"{SHARDS}::test_roles_on_other_devices_sum_among_themselves"),
            "deepspeed": works(f"{DEEPSPEED}::test_roles_on_other_devices_train_as_if_alone"),
            "megatron": Refused("actor_train.device_mapping", "torch_train"),
        },
        others={"adv_estimator": "gae"},
    ),
    Feature(
        "several nodes",
        {"num_gpus_per_node": 1},
        {
            "torch": works(NODES, "tests/engines/nodes_ray.py", remark="Ray or torchrun"),
            "fsdp2": works(NODES, remark="tried with torchrun"),
            "deepspeed": works(ENGINE_NODES, remark="tried with torchrun"),
            "megatron": works(ENGINE_NODES, remark="tried with torchrun"),
        },
    ),
    Feature(
        "feeds `embedded`",
        {"actor_infer.device_mapping": [0, 1]},
        {
            "torch": works(
                "tests/parity/test_replicas.py::test_two_replicas_play_what_one_plays_each_a_fair_share_and_follow_the_trainer"
            ),
            "fsdp2": works("tests/parity/test_fsdp2_feeds.py::test_replicas_sample_from_what_is_trained"),
            "deepspeed": works(OUR_EXAMPLE),
            "megatron": works(OUR_EXAMPLE),
        },
        is_sampled=True,
    ),
    Feature(
        "feeds `vllm`",
        {"actor_infer.device_mapping": [0, 1], "actor_infer.strategy_args.strategy_name": "vllm"},
        {
            "torch": works("tests/engines/train_vllm.py"),
            "fsdp2": works(FED_VLLM),
            "deepspeed": works(FED_VLLM),
            "megatron": works(FED_VLLM),
        },
        is_sampled=True,
    ),
)
"""Servers of SGLang get the tensors that vLLM gets, by the same calls; only a stand-in has been fed."""


def table() -> list[str]:
    """The lines of the table in docs/ranks.md."""
    lines = [f"| | {' | '.join(f'`{engine}`' for engine in ENGINES)} |", "|---|---|---|---|---|"]
    for feature in FEATURES:
        texts = [_text(feature.cells[engine]) for engine in ENGINES]
        lines.append(f"| {feature.title} | {' | '.join(texts)} |")
    return lines


def _text(cell: Cell) -> str:
    if isinstance(cell, Refused):
        return f"no: `{cell.instead}`"
    return f"yes, {cell.remark}" if cell.remark else "yes"
