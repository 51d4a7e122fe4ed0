"""The library's side of `real_model.py`, in a process of its own that answers with a line of JSON.

`examples/smollm/grpo.yaml` with the job's batch; all else is as in a user's run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from real_model_job import RealJob

from turnwise.assemble.agentic import build_agentic
from turnwise.assemble.run import start_run
from turnwise.config import AgenticConfig, load_config
from turnwise.examine.examined import examine
from turnwise.tracking.jsonl import read_metrics

EXAMPLE = Path(__file__).parents[1] / "examples" / "smollm" / "grpo.yaml"
PARTS = ("engine", "environments", "waiting", "agents")
"""Shares of a step's time, of `time/rollouts/…`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", help="JSON of a `RealJob`")
    job = RealJob(**json.loads(parser.parse_args().job))
    torch.set_num_threads(job.threads)
    sys.path.append(str(EXAMPLE.parent))  # has the config's reward, as the command `turnwise` sees to it
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(run(job, Path(folder))), flush=True)


def run(job: RealJob, folder: Path) -> dict[str, Any]:
    """What `RealJob` says of an answer; further the seconds of rollouts and updates, their tokens, the share
    of tokens that siblings share, and what rollouts waited for."""
    config, _ = load_config(EXAMPLE, overrides(job, folder), AgenticConfig)
    pipeline = build_agentic(examine(config), start_run(config), is_quiet=True)
    try:
        pipeline.run()
    finally:
        pipeline.close()
    steps = [row for row in read_metrics(pipeline.folder.metrics) if "time/step_total" in row]
    return {
        "step_s": [row["time/step_wall"] for row in steps],
        "sampled": [row["rollout/sampled_tokens"] for row in steps],
        "scores": [row["rollout/score/mean"] for row in steps],
        "rollout_s": [row["time/step_rollout"] for row in steps],
        "train_s": [row["time/step_train"] for row in steps],
        "total": [row["rollout/total_tokens"] for row in steps],
        "merged": [row.get("batch/actor_train/train/merged", 0.0) for row in steps],
        "parts": [{part: row.get(f"time/rollouts/{part}", 0.0) for part in PARTS} for row in steps],
    }


def overrides(job: RealJob, folder: Path) -> list[str]:
    """The job's numbers, and TRL's objective: a mean over the batch's tokens. An update without any gradient
    would be left out, which TRL's isn't: an entropy bonus too small to change a weight keeps it."""
    return [
        f"pretrain={job.model}",
        f"output_dir={folder}",
        f"seed={job.seed}",
        f"max_steps={job.steps}",
        "eval_steps=0",
        f"rollout_batch_size={job.batch}",
        f"sequence_length={job.max_length}",
        f"data.train_files=[{job.rows}]",
        "data.val_files=[]",
        f"actor_infer.generating_args.max_new_tokens={job.new_tokens}",
        f"actor_train.training_args.learning_rate={job.learning_rate}",
        f"actor_train.training_args.per_device_train_batch_size={job.batch}",
        f"train_env_manager.num_env_groups={job.groups}",
        f"train_env_manager.group_size={job.group_size}",
        "loss_agg_mode=token-mean",
        "entropy_loss_coef=1.0e-12",
        "track_with=[]",
    ]


if __name__ == "__main__":
    main()
