"""Whole runs in mode `step`: one sample a turn, a schedule that ends with the run, a journal to train from, and every bit again
after a resume."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from turnwise.batching.samples import build_samples
from turnwise.build.agentic import build_agentic
from turnwise.build.run import start_run
from turnwise.config import AgenticConfig, parse_config
from turnwise.rollout.journal import read_journal
from turnwise.tracking.jsonl import read_metrics

NUM_STEPS, RATE = 3, 1e-3


@pytest.fixture
def run(tiny_model, tmp_path):
    """Runs some steps in which episodes have different lengths, and returns the pipeline; its run's samples are in `seen`."""

    def run(name="whole", **changes):
        training = {"learning_rate": RATE, "per_device_train_batch_size": 4, "lr_scheduler_type": "linear"}
        values = {
            "exp_name": "steps",
            "pretrain": str(tiny_model),
            "output_dir": str(tmp_path / name),
            "max_steps": NUM_STEPS,
            "save_steps": 1,
            "rollout_batch_size": 8,
            "sequence_length": 256,
            "track_with": [],
            "deterministic": True,
            "actor_train": {"training_args": training},
            "entropy_loss_coef": 0.001,
            "train_env_manager": {
                "num_env_groups": 3,
                "group_size": 4,
                "tags": ["Lake", "Toy"],
                "num_groups_partition": [1, 2],
            },
            "custom_envs": {
                "Lake": {
                    "env_type": "frozen_lake",
                    "env_config": {"size": 3, "is_slippery": True, "env_instruction": "Walk."},
                    "mode": "step",
                    "history_length": 1,
                    "max_steps": 3,
                    "max_tokens_per_step": 3,
                    "action_pattern": None,
                    "agent_template": "{history}\n{current_observation}",
                },
                "Toy": {
                    "env_type": "turnwise.testing.toy_envs:LettersEnv",
                    "mode": "step",
                    "max_tokens_per_step": 3,
                    "action_pattern": None,
                },
            },
        }
        config, _ = parse_config(values | changes, AgenticConfig)
        pipeline = build_agentic(config, start_run(config))
        try:
            pipeline.run()
        finally:
            pipeline.close()
        return pipeline

    yield run
    torch.use_deterministic_algorithms(False)


def rows_of(pipeline):
    rows = read_metrics(pipeline.folder.metrics)
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "system/tps"))} for row in rows]


def played(pipeline):
    rows = [json.loads(line) for line in pipeline.folder.rollouts.read_text().splitlines()]
    for turn in (turn for row in rows for turn in row["turns"]):
        del turn["generate_s"], turn["step_s"]
    return rows


def test_a_run_trains_on_one_sample_a_turn_and_its_schedule_ends_with_it(run):
    rows = rows_of(pipeline := run())
    assert len(rows) == NUM_STEPS
    for step, row in enumerate(rows):
        assert row["rollout/num_contexts"] == row["rollout/num_turns"] >= 2
        assert row["rollout/num_samples"] == 8 * row["rollout/num_turns"]
        num_updates = -(-row["rollout/num_samples"] // 4)
        assert row["actor/backward_steps"] == num_updates > 2, "more than a batch with one sample a trajectory makes"
        assert row["actor/lr"] == pytest.approx(RATE * (1 - (step + (num_updates - 1) / num_updates) / NUM_STEPS))
        # Contexts share what they begin with, among steps and siblings; the trainer sees each alone.
        assert row["actor/train_infer_diff_token_max"] < 1e-4 and row["parity/logprob_diff_max"] < 1e-4
    assert {row["rollout/num_samples"] for row in rows} != {rows[0]["rollout/num_samples"]}
    assert pipeline.actor_train.plan.position(NUM_STEPS, 0, num_samples=99) == NUM_STEPS * 2


def test_the_journal_gives_the_samples_back(run):
    pipeline = run(max_steps=1)
    trajectories = [trajectory for _, trajectory in read_journal(pipeline.folder.rollouts)]
    for trajectory in trajectories:
        samples = build_samples(trajectory)
        assert len(samples) == len(trajectory.turns) and all(turn.starts_context for turn in trajectory.turns)
        for sample, turn in zip(samples, trajectory.turns, strict=True):
            np.testing.assert_array_equal(sample.token_ids, np.concatenate([turn.prompt_ids, turn.response_ids]))
            np.testing.assert_array_equal(sample.rollout_logprobs[sample.response_mask], turn.logprobs)
    assert sum(len(t.turns) for t in trajectories) == rows_of(pipeline)[0]["rollout/num_samples"]
    assert all("advantage" in turn for row in played(pipeline) for turn in row["turns"])


def test_going_on_from_a_checkpoint_changes_no_bit(run):
    whole = run()
    resumed = run("resumed", resume_from_checkpoint=str(whole.checkpoints.path / f"checkpoint-{NUM_STEPS - 1}"))
    assert rows_of(resumed)[-1] == rows_of(whole)[-1]
    assert played(resumed)[-8:] == played(whole)[-8:]
    ours, theirs = (load_file(p.checkpoints.newest / "model.safetensors") for p in (resumed, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
