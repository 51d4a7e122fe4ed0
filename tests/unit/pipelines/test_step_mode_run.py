"""Whole runs in mode `step`: one sample a turn, a schedule that ends with the run, a journal to train from,
and every bit again after a resume."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_runs import assert_same_weights, measured, played, run_small, small_config, training

from turnwise.batching.samples import build_samples
from turnwise.rollout.journal import read_journal

NUM_STEPS, RATE = 3, 1e-3
MANAGER = {"num_env_groups": 3, "group_size": 4, "tags": ["Lake", "Toy"], "num_groups_partition": [1, 2]}
STEPS = {"mode": "step", "max_tokens_per_step": 3, "action_pattern": None}
LAKE = {
    "env_type": "frozen_lake",
    "env_config": {"size": 3, "is_slippery": True, "env_instruction": "Walk."},
    "history_length": 1,
    "max_steps": 3,
    "agent_template": "{history}\n{current_observation}",
}


@pytest.fixture(scope="module")
def run(tiny_model, tmp_path_factory):
    """Runs some steps in which episodes have different lengths, and returns the pipeline."""

    def run(**changes):
        own = {
            "exp_name": "steps",
            "max_steps": NUM_STEPS,
            "deterministic": True,
            "actor_train": training(RATE, lr_scheduler_type="linear"),
            "entropy_loss_coef": 0.001,
            "train_env_manager": MANAGER,
            "custom_envs": {"Lake": LAKE | STEPS, "Toy": {"env_type": "toy_envs:LettersEnv"} | STEPS},
        }
        return run_small(small_config(tiny_model, tmp_path_factory.mktemp("runs"), **own | changes))

    yield run
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def whole(run):
    return run()


def test_a_run_trains_on_one_sample_a_turn_and_its_schedule_ends_with_it(whole):
    rows = measured(whole.folder)
    assert len(rows) == NUM_STEPS
    for step, row in enumerate(rows):
        assert row["rollout/num_contexts"] == row["rollout/num_turns"] >= 2
        assert row["rollout/num_samples"] == 8 * row["rollout/num_turns"]
        num_updates = -(-row["rollout/num_samples"] // 4)
        assert row["actor/backward_steps"] == num_updates > 2, (
            "more than a batch with one sample a trajectory makes"
        )
        assert row["actor/lr"] == pytest.approx(
            RATE * (1 - (step + (num_updates - 1) / num_updates) / NUM_STEPS)
        )
        # Contexts share what they begin with, among steps and siblings; the trainer sees each alone.
        assert row["actor/train_infer_diff_token_max"] < 1e-4 and row["parity/logprob_diff_max"] < 1e-4
    assert {row["rollout/num_samples"] for row in rows} != {rows[0]["rollout/num_samples"]}
    assert whole.actor_train.plan.position(NUM_STEPS, 0, num_samples=99) == NUM_STEPS * 2


def test_the_journal_gives_the_samples_back(whole):
    trajectories = [trajectory for _, trajectory in read_journal(whole.folder.rollouts)]
    for trajectory in trajectories:
        samples = build_samples(trajectory)
        assert len(samples) == len(trajectory.turns) and all(turn.starts_context for turn in trajectory.turns)
        for sample, turn in zip(samples, trajectory.turns, strict=True):
            np.testing.assert_array_equal(
                sample.token_ids, np.concatenate([turn.prompt_ids, turn.response_ids])
            )
            np.testing.assert_array_equal(sample.rollout_logprobs[sample.response_mask], turn.logprobs)
    assert sum(len(t.turns) for t in trajectories) == sum(
        row["rollout/num_samples"] for row in measured(whole.folder)
    )
    assert all("advantage" in turn for row in played(whole.folder) for turn in row["turns"])


def test_going_on_from_a_checkpoint_changes_no_bit(run, whole):
    resumed = run(resume_from_checkpoint=str(whole.checkpoints.path / f"checkpoint-{NUM_STEPS - 1}"))
    assert measured(resumed.folder)[-1] == measured(whole.folder)[-1]
    assert played(resumed.folder)[-8:] == played(whole.folder)[-8:]
    assert_same_weights(resumed.checkpoints.newest, whole.checkpoints.newest)
