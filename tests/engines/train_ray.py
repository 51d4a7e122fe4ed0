"""Two ranks under Ray train what two forked processes train: GRPO on FrozenLake, played and from given
episodes."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from turnwise.cli.main import exit_status, main as turnwise
from turnwise.models.make import make_model

CONFIG = Path(__file__).parents[2] / "examples" / "frozen_lake" / "agentic.yaml"
TEXT = (
    "Walk to the goal G and avoid the holes O. You are at row 0, column 1. Up Down Left Right user "
    "assistant system"
)
STEPS = 4
TIMED = ("time/", "system/", "weights/", "health")
"""Metrics that depend on the clock, or on the copies that were made; sentences that name the run's folder."""
SAMPLED = ("rollout/log_prob/", "actor/train_infer_", "actor/log_prob_change", "parity/")
"""Metrics of the sampler's log-probs. An actor's server decodes together what has arrived, so their last bits
depend on the clock; nothing that is trained does."""
SAMPLER_ERROR = 1e-6


def small(scratch: str, folder: str) -> dict[str, object]:
    return {
        "max_steps": STEPS,
        "eval_steps": 0,
        "save_steps": 0,
        "rollout_batch_size": 32,
        "train_env_manager.num_env_groups": 4,
        "custom_envs.FrozenLake.max_steps": 3,
        "actor_train.device_mapping": "[0,1]",
        "num_gpus_per_node": 2,
        "pretrain": folder,
        "deadlines.start_s": 600,
        # Random weights rarely reach the goal: what moves them is the entropy, held by the reference.
        "entropy_loss_coef": 0.1,
        "use_kl_loss": "true",
        "actor_train.training_args.warmup_steps": 0,
    }


def trained(scratch: str, name: str, keys: dict[str, object], *options: str) -> Path:
    """The folder of a run."""
    texts = [f"{key}={value}" for key, value in {**keys, "output_dir": f"{scratch}/{name}"}.items()]
    assert turnwise(["train", str(CONFIG), "--quiet", *options, *texts]) == 0
    [folder] = Path(scratch).glob(f"{name}/*/*/")
    return folder


def weights(folder: Path) -> bytes:
    [file] = folder.glob("checkpoints/*/model.safetensors")
    return file.read_bytes()


def measured(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [
        {name: value for name, value in json.loads(line).items() if not name.startswith(TIMED)}
        for line in lines
    ]


def main() -> None:
    os.environ["TURNWISE_KERNELS"] = "off"
    with tempfile.TemporaryDirectory() as scratch:
        made = make_model("tiny", Path(scratch) / "model", [TEXT], seed=0)
        # Environments live in workers: forks of this machine, or actors.
        keys = small(scratch, str(made.folder)) | {"train_env_manager.max_env_num_per_worker": 16}
        forks = {**keys, "cluster.name": "process"}
        actors = {**keys, "cluster.name": "ray"}
        forked = trained(scratch, "process", forks)
        acted = trained(scratch, "ray", actors)
        steps = measured(forked)
        assert len(steps) == STEPS and all(step["actor_train/grad_norm"] > 0 for step in steps)
        assert not differences(forked, acted), differences(forked, acted)
        assert weights(acted) == weights(forked)
        episodes = ("--from-rollouts", str(forked / "rollouts.jsonl"))
        forked = trained(scratch, "process_again", forks, *episodes)
        acted = trained(scratch, "ray_again", actors, *episodes)
        assert not differences(forked, acted), differences(forked, acted)
        print(f"ray: {STEPS} steps of two ranks, played and from episodes, as in two forked processes")


def differences(one: Path, other: Path) -> list[tuple[int, str, float | None, float | None]]:
    """Where two runs differ: `(step, metric, value, other value)`. Metrics of `SAMPLED` may differ by
    `SAMPLER_ERROR`."""
    differing: list[tuple[int, str, float | None, float | None]] = []
    for step, (left, right) in enumerate(zip(measured(one), measured(other), strict=True)):
        for name in left.keys() | right.keys():
            mine = left.get(name)
            theirs = right.get(name)
            if mine == theirs:
                continue
            is_close = None not in (mine, theirs) and abs(mine - theirs) <= SAMPLER_ERROR
            if not (is_close and name.startswith(SAMPLED)):
                differing.append((step, name, mine, theirs))
    return differing


if __name__ == "__main__":
    sys.exit(exit_status(main))
