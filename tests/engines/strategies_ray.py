"""Sharded strategies train under Ray what they train in forked processes: FSDP2 on two ranks. With
`deepspeed` or `megatron` on the command line ZeRO 2 and 3 do, or Megatron with a tensor-parallel size of two,
which does so under torchrun too. The engine's environment needs Ray's packages behind its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ENGINE = sys.argv[1] if len(sys.argv) > 1 else "fsdp2"
if ENGINE == "megatron":
    # Processes that the runs start run Megatron on a CPU too, actors and torchrun's included.
    site = Path(__file__).parents[1] / "support" / "megatron_site"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(site), os.environ["PYTHONPATH"]])

from small_runs import LAUNCHER  # noqa: E402
from train_ray import CONFIG, TEXT, differences, measured, small, trained  # noqa: E402

from turnwise.cli.main import exit_status  # noqa: E402
from turnwise.cluster.fork_server import prepare_processes  # noqa: E402
from turnwise.models.make import make_model  # noqa: E402

STEPS = 2
MODEL = {"num_attention_heads": 4, "num_key_value_heads": 2}
CONFIGS: dict[str, dict[str, dict[str, object]]] = {
    "fsdp2": {"fsdp2": {}},
    "deepspeed": {
        "ZeRO 2": {"zero_optimization.stage": 2},
        "ZeRO 3": {"zero_optimization.stage": 3},
    },
    "megatron": {"tensor parallel": {"tensor_model_parallel_size": 2}},
}
"""Engine → name → keys of its `strategy_config`."""


def keys_of(config: dict[str, object], scratch: str, model: str) -> dict[str, object]:
    role = "actor_train.strategy_args"
    options = {f"++{role}.strategy_config.{key}": value for key, value in config.items()}
    strategy = {f"{role}.strategy_name": f"{ENGINE}_train"}
    return {**small(scratch, model), "max_steps": STEPS, **strategy, **options}


def launched(scratch: str, keys: dict[str, object]) -> Path:
    """The folder of a run whose two processes torchrun has started."""
    texts = [f"{key}={value}" for key, value in {**keys, "output_dir": f"{scratch}/torchrun"}.items()]
    arguments = ["-m", "turnwise.cli.main", "train", str(CONFIG), "--quiet", *texts]
    subprocess.run([sys.executable, *LAUNCHER, *arguments], check=True)
    [folder] = Path(scratch).glob("torchrun/*/*/")
    return folder


def check(name: str, config: dict[str, object], model: str) -> None:
    """The runs differ in nothing but what depends on the clock."""
    with tempfile.TemporaryDirectory() as scratch:
        keys = keys_of(config, scratch, model)
        forked = trained(scratch, "process", {**keys, "cluster.name": "process"})
        steps = measured(forked)
        assert len(steps) == STEPS and all(step["actor_train/grad_norm"] > 0 for step in steps)
        runs = {"Ray": trained(scratch, "ray", {**keys, "cluster.name": "ray"})}
        if ENGINE == "megatron":
            runs["torchrun"] = launched(scratch, keys)
        for place, folder in runs.items():
            assert not differences(forked, folder), (name, place, differences(forked, folder))
        print(f"ray: {name}: {STEPS} steps of two ranks under {' and '.join(runs)}, as in forked processes")


def main() -> None:
    os.environ["TURNWISE_KERNELS"] = "off"
    if ENGINE == "megatron":
        prepare_processes(["turnwise.assemble.strategies", "turnwise.training.megatron.strategy"])
    with tempfile.TemporaryDirectory() as scratch:
        made = make_model("tiny", Path(scratch) / "model", [TEXT], seed=0, overrides=MODEL)
        for name, config in CONFIGS[ENGINE].items():
            check(name, config, str(made.folder))


if __name__ == "__main__":
    sys.exit(exit_status(main))
