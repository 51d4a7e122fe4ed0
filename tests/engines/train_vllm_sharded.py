"""Sharded policies feed vLLM: two ranks of FSDP2 train, vLLM samples with the model on two tensor-parallel
ranks, and sampler and trainer agree after each of four updates. With `megatron` or `deepspeed` and a folder
of its packages on the command line, two ranks of that engine train."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
if sys.argv[1:2] == ["megatron"]:
    site = ROOT / "tests" / "support" / "megatron_site"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(site), os.environ["PYTHONPATH"]])
sys.path += sys.argv[2:3]

from turnwise.cli.main import exit_status, main as turnwise  # noqa: E402
from turnwise.models.make import make_model  # noqa: E402
from turnwise.play.tokenizer_text import environment_text  # noqa: E402
from turnwise.tracking.jsonl import read_metrics  # noqa: E402

CONFIG = ROOT / "examples" / "frozen_lake" / "agentic.yaml"
NUM_UPDATES = 4
STRATEGIES: dict[str, dict[str, object]] = {
    "fsdp2": {},
    "deepspeed": {"++actor_train.strategy_args.strategy_config.zero_optimization.stage": 2},
    "megatron": {"++actor_train.strategy_args.strategy_config.tensor_model_parallel_size": 2},
}


def train(engine: str, scratch: Path) -> None:
    made = make_model("tiny", scratch / "model", environment_text(), seed=0)
    few = {
        "pretrain": made.folder,
        "output_dir": scratch / "runs",
        "max_steps": NUM_UPDATES + 1,
        "eval_steps": 0,
        "save_steps": 0,
        "sequence_length": 512,
        "rollout_batch_size": 8,
        "train_env_manager.num_env_groups": 2,
        "train_env_manager.group_size": 4,
        "custom_envs.FrozenLake.max_steps": 2,
        "entropy_loss_coef": 0.05,
        "num_gpus_per_node": 2,
        "actor_train.device_mapping": "[0,1]",
        "actor_train.strategy_args.strategy_name": f"{engine}_train",
        "actor_train.training_args.per_device_train_batch_size": 4,
        "actor_train.training_args.learning_rate": 1e-3,
        "actor_train.training_args.warmup_steps": 0,
        "actor_infer.device_mapping": "[0,1]",
        "actor_infer.strategy_args.strategy_name": "vllm",
        "++actor_infer.strategy_args.strategy_config.tensor_parallel_size": 2,
        "++actor_infer.strategy_args.strategy_config.max_model_len": 512,
        "deadlines.request_s": 900,
        **STRATEGIES[engine],
    }
    changes = [f"{key}={value}" for key, value in few.items()]
    assert turnwise(["train", str(CONFIG), "--quiet", *changes]) == 0
    [metrics] = (scratch / "runs").glob("**/metrics.jsonl")
    steps = read_metrics(metrics)
    assert len(steps) == NUM_UPDATES + 1
    assert all(step["actor_train/grad_norm"] > 0 for step in steps)
    # Each step is sampled with the weights of the update before it.
    differences = [step["parity/logprob_diff_max"] for step in steps]
    print(
        f"vllm: {engine} on 2 ranks, tensor-parallel 2: at most", *(f"{value:.1e}" for value in differences)
    )
    assert max(differences) <= 1e-5, differences


def main() -> None:
    # Plain torch computes the log-probs that vLLM's are compared with.
    os.environ |= {"TURNWISE_KERNELS": "off", "VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_HOST_IP": "127.0.0.1"}
    engine = sys.argv[1] if len(sys.argv) > 1 else "fsdp2"
    with tempfile.TemporaryDirectory() as scratch:
        train(engine, Path(scratch))


if __name__ == "__main__":
    sys.exit(exit_status(main))
