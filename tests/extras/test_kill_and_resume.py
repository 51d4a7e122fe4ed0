"""kill −9 at random instants (twenty in `make test-full`), in rollouts, updates and the writing of
checkpoints: the run that goes on each time ends with the metrics, trajectories and weights of one that was
never touched."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import forked
import pytest
import torch
import yaml
from small_runs import LETTERS, measured, played, training
from transformers import AutoModelForCausalLM

from turnwise.lifecycle.run_folder import RunFolder
from turnwise.models.make import make_model

NUM_KILLS = 20 if os.environ.get("TURNWISE_FULL") else 3
NUM_STEPS = 150 if os.environ.get("TURNWISE_FULL") else 30
"""A run lives through each kill for up to two entries of a phase; a validation comes every third step."""
PHASES = ("rollout", "train", "checkpoint", "adv", "model_update", "val")
SHAPE = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}

DRIVER = """
import os, sys
from turnwise.config import AgenticConfig, load_config
from turnwise.assemble.agentic import build_agentic
from turnwise.assemble.run import start_run
from turnwise.examine.examined import examine
from turnwise.lifecycle.session import run_to_end
from turnwise.tracking.run_log import RunLog

config, _ = load_config(sys.argv[1], sys.argv[3:], AgenticConfig)
sign = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT)
begin = RunLog.phase

def phase(log, name):
    os.pwrite(sign, name.ljust(40).encode(), 0)
    return begin(log, name)

RunLog.phase = phase
folder = start_run(config)
run_to_end(folder, lambda: build_agentic(examine(config), folder))
"""
"""A run that says, in the first 40 bytes of a file, which phase it is in."""


@pytest.fixture
def job(tmp_path):
    make_model(
        "tiny",
        tmp_path / "model",
        ["write 0 1 2 3 4 5 6 7 8 9 more "],
        overrides=SHAPE | {"intermediate_size": 64},
    )
    (tmp_path / "driver.py").write_text(DRIVER)
    config = {
        "exp_name": "kill",
        "pretrain": str(tmp_path / "model"),
        "max_steps": NUM_STEPS,
        "save_steps": 1,
        "eval_steps": 3,
        "rollout_batch_size": 8,
        "val_batch_size": 8,
        "sequence_length": 256,
        "track_with": ["tensorboard"],
        "deterministic": True,
        "reward_normalization": {"norm_std_type": "running"},
        "add_token_level_kl": True,
        "init_kl_coef": 0.05,
        "target_kl": 0.02,
        "actor_train": training(lr_scheduler_type="cosine", warmup_steps=3),
        "train_env_manager": {"num_env_groups": 2, "group_size": 4},
        "val_env_manager": {"num_env_groups": 2, "group_size": 4},
        "custom_envs": {"Letters": {**LETTERS, "max_steps": 3}},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


def start(job, output_dir, *overrides):
    sign = job / f"{output_dir}.phase"
    sign.write_text(" " * 40)
    arguments = ["job.yaml", str(sign), f"output_dir={output_dir}", *overrides]
    with (job / f"{output_dir}.err").open("ab") as err:
        options = {"cwd": job, "stdout": subprocess.DEVNULL, "stderr": err}
        return forked.Popen(arguments, module="driver", **options), sign


def kill_in(phase, process, sign, rng):
    """Kills the process a few milliseconds after it has entered the phase for the n-th time; whether it still
    lived."""
    for _ in range(rng.randint(1, 2)):
        for is_inside in (False, True):
            while (sign.read_text().strip() == phase) is not is_inside:
                if process.poll() is not None:
                    return False
                time.sleep(0.0005)
    time.sleep(rng.uniform(0, 0.02))
    process.send_signal(signal.SIGKILL)
    return process.wait() == -signal.SIGKILL


def result(job, output_dir):
    [run] = (job / output_dir / "kill").iterdir()
    folder = RunFolder(run)
    newest = max(
        (run / "checkpoints").iterdir(), key=lambda folder: int(folder.name.removeprefix("checkpoint-"))
    )
    return measured(folder), played(folder), AutoModelForCausalLM.from_pretrained(newest).state_dict()


def test_kills_change_no_bit(job: Path):
    whole, _ = start(job, "whole")
    assert whole.wait() == 0, (job / "whole.err").read_text()
    rng = random.Random(0)
    killed = 0
    while killed < NUM_KILLS:
        process, sign = start(job, "killed", "resume_from_checkpoint=true")
        assert kill_in(PHASES[killed % len(PHASES)], process, sign, rng), (job / "killed.err").read_text()
        killed += 1
    last, _ = start(job, "killed", "resume_from_checkpoint=true")
    assert last.wait() == 0, (job / "killed.err").read_text()

    rows, played, weights = result(job, "killed")
    expected_rows, expected_played, expected_weights = result(job, "whole")
    assert len(rows) == NUM_STEPS + 1 and rows == expected_rows
    assert played == expected_played
    assert all(torch.equal(weights[name], expected_weights[name]) for name in expected_weights)
