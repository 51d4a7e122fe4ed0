"""The library's side of `end_to_end.py`, in a process of its own that answers with a line of JSON.

`examples/frozen_lake/agentic.yaml` with the job's batch and turns; all else is as in a user's run.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml
from end_to_end_job import Job
from frozen_lake_player import EXAMPLE, TAG

from turnwise.assemble.agentic import build_agentic
from turnwise.assemble.run import start_run
from turnwise.config import AgenticConfig, parse_config
from turnwise.examine.examined import examine
from turnwise.tracking.jsonl import read_metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", help="JSON of a `Job`")
    job = Job(**json.loads(parser.parse_args().job))
    torch.set_num_threads(job.threads)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(run(job, Path(folder))), flush=True)


def run(job: Job, folder: Path) -> dict[str, Any]:
    """What `Job` says of an answer, and the shares of tokens whose computation siblings share."""
    config = parse_config(settings(job, folder), AgenticConfig)[0]
    pipeline = build_agentic(examine(config), start_run(config), is_quiet=True)
    try:
        pipeline.run()
    finally:
        pipeline.close()
    rows = read_metrics(pipeline.folder.metrics)
    steps = [row for row in rows if "time/step_total" in row]
    # Everything between two steps, metrics and journal included; validation alone is left out.
    step_s = [row["time/step_wall"] - row.get("time/step_val", 0.0) for row in steps]
    success = f"val/env/{TAG}/success"
    return {
        "step_s": step_s,
        "rollout_s": [row["time/step_rollout"] for row in steps],
        "tokens": [
            {"total": row["rollout/total_tokens"], "sampled": row["rollout/sampled_tokens"]} for row in steps
        ],
        # A step whose groups score alike has no update, and no batch, unless the loss has an entropy term.
        "merged": [row.get("batch/actor_train/train/merged", 0.0) for row in steps],
        "curve": [
            (sum(step_s[: row["step"]]), row[success]) for row in rows if success in row and row["step"]
        ],
    }


def settings(job: Job, folder: Path) -> dict[str, Any]:
    """The example with the job's numbers, and TRL's objective: no entropy bonus, a mean over the batch's
    tokens.

    The groups of a model with random weights score alike, and an update without any gradient is left out,
    which TRL's isn't. So where steps are timed, an entropy bonus too small to change a weight keeps it."""
    values = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    values["custom_envs"][TAG]["max_steps"] = job.max_turns
    values["train_env_manager"] |= {"num_env_groups": job.groups, "group_size": job.group_size}
    values["actor_train"]["training_args"] |= {
        "learning_rate": job.learning_rate,
        "adam_beta2": job.adam_beta2,
        "warmup_steps": job.warmup_steps,
        "per_device_train_batch_size": job.batch,
    }
    return values | {
        "output_dir": str(folder),
        "pretrain": job.model,
        "seed": job.seed,
        "max_steps": job.steps,
        "rollout_batch_size": job.batch,
        "val_batch_size": job.eval_episodes,
        "eval_steps": job.eval_every,
        "val_env_manager": {"num_env_groups": job.eval_episodes},
        "sequence_length": job.max_length,
        "entropy_loss_coef": 0.0 if job.eval_every else 1e-12,
        "loss_agg_mode": "token-mean",
        "track_with": [],
    }


if __name__ == "__main__":
    main()
