"""A run that goes on is the run that was never stopped."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from functools import partial

import pytest
import torch
from disturbed import interrupted
from small_runs import assert_same_weights, broken_model, measured, played, sft_config, small_config, training

from turnwise.build.agentic import build_agentic
from turnwise.build.run import start_run
from turnwise.build.sft import build_sft
from turnwise.errors import CheckpointError, ModelError
from turnwise.pipelines.checkpoints import all_checkpoints
from turnwise.pipelines.run_folder import RunFolder
from turnwise.pipelines.session import run_to_end


def config_of(model, output_dir, /, **changes):
    own = {
        "max_steps": 4,
        "eval_steps": 2,
        "val_batch_size": 4,
        "track_with": ["tensorboard"],
        "deterministic": True,
        "reward_normalization": {"norm_std_type": "running"},
        "add_token_level_kl": True,
        "init_kl_coef": 0.1,
        "target_kl": 0.01,
        "actor_train": training(warmup_steps=3),
        "val_env_manager": {"num_env_groups": 1, "group_size": 4},
    }
    return small_config(model, output_dir, **own | changes)


@pytest.fixture
def make_config(tiny_model, tmp_path):
    return partial(config_of, tiny_model, tmp_path / "runs")


@pytest.fixture(autouse=True)
def other_tests_need_no_determinism():
    yield
    torch.use_deterministic_algorithms(False)


def run(config, build=build_agentic):
    pipeline = build(config, start_run(config))
    with closing(pipeline):
        pipeline.run()
    return pipeline


def assert_same_run(resumed, whole):
    assert measured(resumed.folder) == measured(whole.folder)
    assert played(resumed.folder) == played(whole.folder)
    assert_same_weights(resumed.checkpoints.newest, whole.checkpoints.newest)


@pytest.fixture(scope="module")
def whole(tiny_model, tmp_path_factory):
    """The run that was never stopped."""
    return run(config_of(tiny_model, tmp_path_factory.mktemp("whole")))


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_stopping_and_going_on_changes_no_bit(make_config, whole, stop):
    stopped = run(make_config(max_steps=stop))
    resumed = run(make_config(resume_from_checkpoint=True))
    assert resumed.folder.path == stopped.folder.path
    assert_same_run(resumed, whole)


@pytest.mark.parametrize("phase", ["rollout", "ref_log_probs", "old_log_probs_values", "adv", "train", "val"])
def test_ctrl_c_in_any_phase_changes_no_bit(make_config, whole, phase):
    """Ctrl-C is pressed in a later step than the first; a step that has begun to change weights is finished."""
    interrupted(make_config(save_steps=0), phase, times=2 if phase == "val" else 3)
    assert_same_run(run(make_config(resume_from_checkpoint=True)), whole)


def test_a_critic_goes_on_bit_by_bit(make_config, tmp_path):
    ppo = {"adv_estimator": "gae", "critic_warmup": 1, "reward_normalization": {}, "ppo_epochs": 2}
    ppo["critic"] = training(1e-2)
    whole = run(make_config(output_dir=str(tmp_path / "whole"), **ppo))
    run(make_config(max_steps=2, **ppo))
    resumed = run(make_config(resume_from_checkpoint=True, **ppo))
    assert_same_run(resumed, whole)
    assert_same_weights(resumed.checkpoints.newest / "critic", whole.checkpoints.newest / "critic")


def test_checkpoints_that_were_pointed_elsewhere_are_still_found(make_config, whole, tmp_path):
    stopped = run(make_config(max_steps=2))
    resumed = run(make_config(resume_from_checkpoint=True, checkpoint_config={"output_dir": str(tmp_path / "disk2")}))
    assert resumed.folder.path == stopped.folder.path
    assert_same_run(resumed, whole)
    again = run(make_config(resume_from_checkpoint=True, max_steps=5))
    assert [row["step"] for row in measured(again.folder)] == [0, 1, 2, 3, 4, 5]


def test_a_resume_that_fails_in_the_start_changes_no_file(make_config, tmp_path):
    stopped = run(make_config(max_steps=3))
    before = {f: f.read_bytes() for f in (stopped.folder.metrics, stopped.folder.rollouts, stopped.folder.config)}
    (stopped.checkpoints.path / "checkpoint-3" / "model.safetensors").write_bytes(b"")
    nowhere = broken_model(tmp_path / "nowhere")
    changed = make_config(resume_from_checkpoint=True, pretrain=str(nowhere), sequence_length=256)
    with pytest.raises(ModelError):
        run_to_end(folder := start_run(changed), lambda: build_agentic(changed, folder))
    assert all(f.read_bytes() == content for f, content in before.items())


def test_where_no_checkpoint_is_whole_nothing_starts_anew(make_config):
    stopped = run(make_config(max_steps=1))
    (stopped.checkpoints.path / "checkpoint-1" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="no checkpoint is complete"):
        run(make_config(resume_from_checkpoint=True))


def test_a_renamed_or_linked_checkpoint_is_taken(make_config, tmp_path):
    stopped = run(make_config(max_steps=2))
    link = tmp_path / "latest"
    link.symlink_to(stopped.checkpoints.newest)
    assert run(make_config(resume_from_checkpoint=str(link), max_steps=3)).folder.path == stopped.folder.path
    copy = shutil.copytree(stopped.checkpoints.path / "checkpoint-2", tmp_path / "best")
    assert measured(run(make_config(resume_from_checkpoint=str(copy), max_steps=3)).folder)[0]["step"] == 2


def test_a_fixed_kl_coefficient_is_the_settings(make_config):
    fixed = {"target_kl": None, "reward_normalization": {}}
    run(make_config(max_steps=1, **fixed))
    rows = measured(run(make_config(max_steps=2, resume_from_checkpoint=True, init_kl_coef=0.5, **fixed)).folder)
    assert (rows[0]["critic/kl_coef"], rows[1]["critic/kl_coef"]) == (0.1, 0.5)


def test_a_run_that_is_done_goes_on_where_more_steps_are_asked_for_only(make_config, whole):
    run(make_config())
    again = run(make_config(resume_from_checkpoint=True))
    assert_same_run(again, whole)
    longer = run(make_config(resume_from_checkpoint=True, max_steps=5))
    assert [row["step"] for row in measured(longer.folder)] == [0, 1, 2, 3, 4, 5]


def test_an_older_checkpoint_is_continued_in_a_folder_of_its_own(make_config, whole):
    first = run(make_config(max_steps=3))
    before = measured(first.folder)
    branch = run(make_config(resume_from_checkpoint=str(first.checkpoints.path / "checkpoint-1")))
    assert branch.folder.path != first.folder.path
    assert_same_run(branch, whole)
    assert measured(first.folder) == before and len(all_checkpoints(first.checkpoints.path)) == 3


def test_a_checkpoint_without_its_run_starts_a_run_at_its_step(make_config, tmp_path):
    first = run(make_config(max_steps=3))
    alone = shutil.copytree(first.checkpoints.newest, tmp_path / "elsewhere" / "checkpoint-3")
    resumed = run(make_config(resume_from_checkpoint=str(alone), output_dir=str(tmp_path / "other")))
    assert [row["step"] for row in measured(resumed.folder)] == [3, 4]


@pytest.mark.parametrize("kind", ["reinforcement", "imitation"])
def test_a_run_without_a_step_of_its_own_saves_what_it_went_on_from(make_config, fine_tune, tmp_path, kind):
    def start(**changes):
        return fine_tune(**changes) if kind == "imitation" else run(make_config(**changes))

    first = start(max_steps=1)
    alone = shutil.copytree(first.checkpoints.newest, tmp_path / "elsewhere" / "checkpoint-1")
    again = start(max_steps=1, resume_from_checkpoint=str(alone))
    assert again.folder.path != first.folder.path
    assert_same_weights(again.checkpoints.newest, alone)


def test_checkpoints_in_a_folder_of_their_own_are_found_again(make_config, whole, tmp_path):
    elsewhere = {"checkpoint_config": {"output_dir": str(tmp_path / "ckpt")}}
    stopped = run(make_config(max_steps=2, **elsewhere))
    assert not (stopped.folder.path / "checkpoints").exists()
    assert_same_run(run(make_config(resume_from_checkpoint=True, **elsewhere)), whole)
    for asked in (stopped.checkpoints.path, stopped.checkpoints.newest):
        assert run(make_config(resume_from_checkpoint=str(asked), **elsewhere)).folder.path == stopped.folder.path


def test_without_a_checkpoint_true_starts_anew_and_a_path_is_refused(make_config, tmp_path, caplog):
    assert measured(run(make_config(resume_from_checkpoint=True, max_steps=1)).folder)[0]["step"] == 0
    assert "has no checkpoint yet; this run starts from the beginning" in caplog.text
    with pytest.raises(CheckpointError, match="there is no checkpoint; give a folder checkpoint-N"):
        run(make_config(resume_from_checkpoint=str(tmp_path / "nowhere")))


def test_a_newer_run_without_checkpoints_hides_no_older_one(make_config):
    stopped = run(make_config(max_steps=1))
    RunFolder.create(stopped.folder.path.parent.parent, "letters").close()
    assert run(make_config(resume_from_checkpoint=True, max_steps=2)).folder.path == stopped.folder.path


def test_changed_settings_are_listed_and_incompatible_ones_refused(make_config, caplog):
    run(make_config(max_steps=1))
    changed = training(5e-4, warmup_steps=3)
    resumed = run(make_config(max_steps=2, resume_from_checkpoint=True, actor_train=changed))
    assert "actor_train.training_args.learning_rate: 0.001 → 0.0005" in caplog.text
    assert "max_steps: 1 → 2" in caplog.text and "output_dir" not in caplog.text.partition("going on from")[2]
    assert measured(resumed.folder)[1]["actor/lr"] == pytest.approx(5e-4), "the new rate, at the old place in the schedule"
    for refused in ({"seed": 7}, {"train_env_manager": {"num_env_groups": 2, "group_size": 4, "tags": ["Sea"]}}):
        envs = {tag: make_config().custom_envs["Letters"].model_dump() for tag in ("Letters", "Sea")}
        with pytest.raises(CheckpointError, match=r"can't be continued with this config:\n  - (seed|train_env_manager.tags)"):
            run(make_config(resume_from_checkpoint=True, custom_envs=envs, **refused))


def test_a_run_that_still_goes_on_is_refused(make_config):
    stopped = run(make_config(max_steps=1))
    busy = RunFolder.reopen(stopped.folder.path)
    with pytest.raises(CheckpointError, match="is in use by process"):
        run(make_config(resume_from_checkpoint=True))
    busy.close()


@pytest.fixture
def fine_tune(tiny_model, tmp_path):
    """Runs fine-tuning on twelve rows, four a step, with the given changes."""
    rows = [
        json.dumps({"messages": [{"role": "user", "content": "P _ G"}, {"role": "assistant", "content": f"walk {i}"}]})
        for i in range(12)
    ]
    (tmp_path / "twelve.jsonl").write_text("\n".join(rows) + "\n")

    def fine_tune(**changes):
        files = [str(tmp_path / "twelve.jsonl")]
        own = {"exp_name": "sft", "train_files": files, "val_files": files, "eval_steps": 2, "num_epochs": 2, "save_steps": 1}
        return run(sft_config(tiny_model, tmp_path, **own | training(1e-2) | changes), build_sft)

    return fine_tune


def test_fine_tuning_goes_on_as_well(fine_tune, tmp_path):
    whole = fine_tune(output_dir=str(tmp_path / "whole"))
    stopped = fine_tune(max_steps=4)
    resumed = fine_tune(resume_from_checkpoint=True)
    assert resumed.folder.path == stopped.folder.path
    assert measured(resumed.folder) == measured(whole.folder)
    assert_same_weights(resumed.checkpoints.newest, whole.checkpoints.newest)


def test_fine_tuning_goes_on_with_another_number_of_devices_if_its_steps_keep_their_size(fine_tune, tmp_path):
    def cut(size, num=1):
        return training(1e-3, size, gradient_accumulation_steps=num)

    whole = fine_tune(output_dir=str(tmp_path / "whole"), **cut(4))
    fine_tune(max_steps=2, device_mapping=[0, 1], num_gpus_per_node=2, **cut(2))
    with pytest.raises(CheckpointError, match=r"config:\n  - samples of an optimiser step: 4 → 2 \(per_device.*\)\nSet them"):
        fine_tune(max_steps=3, resume_from_checkpoint=True, **cut(2))
    fine_tune(max_steps=3, resume_from_checkpoint=True, **cut(2, 2))
    resumed = fine_tune(resume_from_checkpoint=True, **cut(4))
    losses = [[row["sft/loss"] for row in measured(made.folder)[:6]] for made in (whole, resumed)]
    assert len(losses[0]) == 6 and losses[1] == pytest.approx(losses[0], rel=1e-3)
