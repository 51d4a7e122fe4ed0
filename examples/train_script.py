"""Trains a model by imitation or reinforcement, alone or in the processes that accelerate or torchrun start.

    python examples/train_script.py --algorithm sft --model_name runs/model --output_dir out/sft accelerate
    launch --config_file examples/accelerate/multi_gpu_ddp.yaml examples/train_script.py --algorithm grpo

Every parameter of `train` (docs/rl_tool.md) is an option: the process that drives the run prints the tool's
answer as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence

from turnwise.cli.main import main as turnwise

DTYPES = {"no": "fp32", "fp16": "fp16", "bf16": "bf16"}
"""By accelerate's `mixed_precision`."""


def refused() -> str:
    """What accelerate was asked for and this script can't do; empty if nothing."""
    told = os.environ.get
    if file := told("ACCELERATE_DEEPSPEED_CONFIG_FILE"):
        return (
            f"deepspeed_config_file {file} isn't read; give its sections as --deepspeed "
            "'{zero_optimization: …}'"
        )
    if (clipping := told("ACCELERATE_GRADIENT_CLIPPING", "none")) not in ("none", "1.0"):
        return f"gradient_clipping is 1.0 here, and accelerate was asked for {clipping}; leave it out"
    if told("ACCELERATE_USE_FSDP", "false") == "true":
        return (
            "accelerate's fsdp_config isn't read here; name fsdp2_train in a config (docs/ranks.md), or use "
            "examples/accelerate/multi_gpu_ddp.yaml"
        )
    if (precision := told("ACCELERATE_MIXED_PRECISION", "no")) not in DTYPES:
        return f"mixed_precision {precision} isn't one of {', '.join(DTYPES)}; add --mixed_precision bf16"
    if (
        "ACCELERATE_MIXED_PRECISION" in os.environ
        and "MASTER_PORT" in os.environ
        and "RANK" not in os.environ
    ):
        return (
            "accelerate was asked for several processes and started one, as it does with --cpu; leave "
            "--cpu out"
        )
    return ""


def deepspeed() -> str:
    """DeepSpeed's config, of what accelerate was told; empty where it was told nothing."""
    told = os.environ.get
    if told("ACCELERATE_USE_DEEPSPEED", "false") != "true":
        return ""
    zero: dict[str, object] = {"stage": int(told("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2"))}
    for part in ("optimizer", "param"):
        if (device := told(f"ACCELERATE_DEEPSPEED_OFFLOAD_{part.upper()}_DEVICE", "none")) != "none":
            zero[f"offload_{part}"] = {"device": device}
    return json.dumps({"zero_optimization": zero})


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Every other --NAME VALUE is a parameter of `train` too (docs/rl_tool.md)."
    )
    parser.add_argument("--algorithm", choices=["sft", "grpo", "ppo"], default="sft")
    parser.add_argument(
        "--model_name", default="runs/model", help="folder of a model, or its name on the hub"
    )
    parser.add_argument("--output_dir", default="./output", help="folder of the result")
    parser.add_argument(
        "--dtype", choices=["fp32", "bf16", "fp16"], help="by default accelerate's mixed_precision"
    )
    parser.add_argument(
        "--deepspeed", help="DeepSpeed's config as YAML; by default what accelerate's deepspeed_config says"
    )
    options, others = parser.parse_known_args(arguments)
    if problem := refused():
        parser.exit(2, f"error: {problem}\n" if os.environ.get("RANK", "0") == "0" else "")
    options.dtype = options.dtype or DTYPES[os.environ.get("ACCELERATE_MIXED_PRECISION", "no")]
    options.deepspeed = options.deepspeed or deepspeed()
    chosen = {name: value for name, value in vars(options).items() if value}
    return turnwise(["tool", "train", *(f"--{name}={value}" for name, value in chosen.items()), *others])


if __name__ == "__main__":
    raise SystemExit(main())
