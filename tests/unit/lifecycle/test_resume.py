"""A run that goes on is the run that was never stopped."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from functools import partial

import pytest
import torch
from disturbed import interrupted
from messages import mentions, says
from small_runs import assert_same_weights, broken_model, measured, played, sft_config, small_config, training

from turnwise.assemble.agentic import build_agentic
from turnwise.assemble.run import start_run
from turnwise.assemble.sft import build_sft
from turnwise.errors import CheckpointError, ModelError
from turnwise.examine.examined import examine
from turnwise.lifecycle.checkpoint_files import all_checkpoints
from turnwise.lifecycle.resume import open_run
from turnwise.lifecycle.run_folder import RunFolder
from turnwise.lifecycle.session import run_to_end

OWN = {
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


@pytest.fixture
def make_config(tiny_model, tmp_path):
    return partial(small_config, tiny_model, tmp_path / "runs", **OWN)


@pytest.fixture(autouse=True)
def other_tests_need_no_determinism():
    yield
    torch.use_deterministic_algorithms(False)


def run(config, build=build_agentic):
    pipeline = build(examine(config), start_run(config))
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
    return run(small_config(tiny_model, tmp_path_factory.mktemp("whole"), **OWN))


@pytest.fixture(scope="module")
def half(tiny_model, tmp_path_factory):
    """A run of half as many steps."""
    return run(small_config(tiny_model, tmp_path_factory.mktemp("half"), **OWN | {"max_steps": 2}))


@pytest.fixture
def copied(tmp_path):
    """Copies a run to where `make_config` looks for it."""
    return lambda run: RunFolder(
        shutil.copytree(run.folder.path, tmp_path / "runs" / "letters" / run.folder.path.name)
    )


@pytest.fixture
def stopped(half, copied):
    return copied(half)


@pytest.mark.parametrize("phase", ["rollout", "adv", "train", "val"])
def test_ctrl_c_in_any_phase_changes_no_bit(make_config, whole, phase):
    """Ctrl-C is pressed in a later step than the first; a step that has begun to change weights is
    finished."""
    interrupted(make_config(save_steps=0), phase, times=2 if phase == "val" else 3)
    assert_same_run(run(make_config(resume_from_checkpoint=True)), whole)


def test_a_critic_goes_on_bit_by_bit(make_config):
    ppo = {"adv_estimator": "gae", "critic_warmup": 1, "reward_normalization": {}, "ppo_epochs": 2}
    ppo["critic"] = training(1e-2)
    whole = run(make_config(**ppo))
    resumed = run(make_config(resume_from_checkpoint=str(whole.checkpoints.path / "checkpoint-2"), **ppo))
    assert_same_run(resumed, whole)
    assert_same_weights(resumed.checkpoints.newest / "critic", whole.checkpoints.newest / "critic")


def test_checkpoints_that_were_pointed_elsewhere_are_still_found(make_config, whole, stopped, tmp_path):
    resumed = run(
        make_config(resume_from_checkpoint=True, checkpoint_config={"output_dir": str(tmp_path / "disk2")})
    )
    assert resumed.folder.path == stopped.path
    assert_same_run(resumed, whole)
    again = run(make_config(resume_from_checkpoint=True, max_steps=5))
    assert [row["step"] for row in measured(again.folder)] == [0, 1, 2, 3, 4, 5]


def test_a_resume_that_fails_in_the_start_changes_no_file(make_config, stopped, tmp_path):
    before = {f: f.read_bytes() for f in (stopped.metrics, stopped.rollouts, stopped.config)}
    (stopped.path / "checkpoints" / "checkpoint-2" / "model.safetensors").write_bytes(b"")
    nowhere = broken_model(tmp_path / "nowhere")
    changed = make_config(resume_from_checkpoint=True, pretrain=str(nowhere), sequence_length=256)
    with pytest.raises(ModelError):
        run_to_end(folder := start_run(changed), lambda: build_agentic(examine(changed), folder))
    assert all(f.read_bytes() == content for f, content in before.items())


def test_where_no_checkpoint_is_whole_nothing_starts_anew(make_config, stopped):
    for checkpoint in all_checkpoints(stopped.path / "checkpoints"):
        (checkpoint / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=says("no checkpoint", "complete")):
        open_run(make_config(resume_from_checkpoint=True))


def place(config):
    """The folder in which a run goes on."""
    folder, _ = open_run(config)
    folder.close()
    return folder.path


def test_a_renamed_or_linked_checkpoint_is_taken(make_config, stopped, tmp_path):
    checkpoint = stopped.path / "checkpoints" / "checkpoint-2"
    (tmp_path / "latest").symlink_to(checkpoint)
    assert place(make_config(resume_from_checkpoint=str(tmp_path / "latest"))) == stopped.path
    copy = shutil.copytree(checkpoint, tmp_path / "best")
    resumed = run(make_config(resume_from_checkpoint=str(copy)))
    assert [row["step"] for row in measured(resumed.folder)] == [2, 3, 4], "there is no run around it"


def test_a_fixed_kl_coefficient_is_the_settings(make_config):
    fixed = {"target_kl": None, "reward_normalization": {}, "eval_steps": 0}
    run(make_config(max_steps=1, **fixed))
    rows = measured(
        run(make_config(max_steps=2, resume_from_checkpoint=True, init_kl_coef=0.5, **fixed)).folder
    )
    assert (rows[0]["critic/kl_coef"], rows[1]["critic/kl_coef"]) == (0.1, 0.5)


def test_a_run_that_is_done_goes_on_where_more_steps_are_asked_for_only(make_config, whole, copied):
    copied(whole)
    assert_same_run(run(make_config(resume_from_checkpoint=True)), whole)
    longer = run(make_config(resume_from_checkpoint=True, max_steps=5))
    assert [row["step"] for row in measured(longer.folder)] == [0, 1, 2, 3, 4, 5]


def test_an_older_checkpoint_is_continued_in_a_folder_of_its_own(make_config, whole, copied):
    first = copied(whole)
    branch = run(make_config(resume_from_checkpoint=str(first.path / "checkpoints" / "checkpoint-1")))
    assert branch.folder.path != first.path
    assert_same_run(branch, whole)
    assert measured(first) == measured(whole.folder) and len(all_checkpoints(first.path / "checkpoints")) == 4


@pytest.mark.parametrize("kind", ["reinforcement", "imitation"])
def test_a_run_without_a_step_of_its_own_saves_what_it_went_on_from(
    make_config, half, fine_tune, fine_tuned, tmp_path, kind
):
    first = fine_tuned if kind == "imitation" else half
    alone = shutil.copytree(first.checkpoints.newest, tmp_path / "elsewhere" / first.checkpoints.newest.name)
    keys = {"max_steps": first.checkpoints.num_steps, "resume_from_checkpoint": str(alone)}
    again = fine_tune(tmp_path, **keys) if kind == "imitation" else run(make_config(**keys))
    assert_same_weights(again.checkpoints.newest, alone)


def test_checkpoints_in_a_folder_of_their_own_are_found_again(make_config, whole, tmp_path):
    elsewhere = {"checkpoint_config": {"output_dir": str(tmp_path / "ckpt")}}
    stopped = run(make_config(max_steps=2, **elsewhere))
    assert not (stopped.folder.path / "checkpoints").exists()
    for asked in (stopped.checkpoints.path, stopped.checkpoints.newest):
        assert place(make_config(resume_from_checkpoint=str(asked), **elsewhere)) == stopped.folder.path
    assert_same_run(run(make_config(resume_from_checkpoint=True, **elsewhere)), whole)


def test_without_a_checkpoint_true_starts_anew_and_a_path_is_refused(make_config, tmp_path, caplog):
    assert measured(run(make_config(resume_from_checkpoint=True, max_steps=1)).folder)[0]["step"] == 0
    assert mentions(caplog.text, "no checkpoint", "from the beginning")
    with pytest.raises(CheckpointError, match=says("no checkpoint", "checkpoint-N")):
        run(make_config(resume_from_checkpoint=str(tmp_path / "nowhere")))


def test_a_newer_run_without_checkpoints_hides_no_older_one(make_config, stopped):
    RunFolder.create(stopped.path.parent.parent, "letters").close()
    assert place(make_config(resume_from_checkpoint=True)) == stopped.path


def test_changed_settings_are_listed_and_incompatible_ones_refused(make_config, stopped, caplog):
    changed = training(5e-4, warmup_steps=3)
    resumed = run(make_config(max_steps=3, resume_from_checkpoint=True, actor_train=changed))
    assert "actor_train.training_args.learning_rate: 0.001 → 0.0005" in caplog.text
    assert "max_steps: 2 → 3" in caplog.text and "output_dir" not in caplog.text.partition("going on from")[2]
    assert measured(resumed.folder)[2]["actor/lr"] == pytest.approx(5e-4), (
        "the new rate, at the old place in the schedule"
    )
    for refused in (
        {"seed": 7},
        {"train_env_manager": {"num_env_groups": 2, "group_size": 4, "tags": ["Sea"]}},
    ):
        envs = {tag: make_config().custom_envs["Letters"].model_dump() for tag in ("Letters", "Sea")}
        with pytest.raises(
            CheckpointError, match=r"can't be continued with this config:\n  - (seed|train_env_manager.tags)"
        ):
            open_run(make_config(resume_from_checkpoint=True, custom_envs=envs, **refused))


def test_a_run_that_still_goes_on_is_refused(make_config, stopped):
    busy = RunFolder.reopen(stopped.path)
    with pytest.raises(CheckpointError, match=says("in use", "process")):
        open_run(make_config(resume_from_checkpoint=True))
    busy.close()


@pytest.fixture(scope="module")
def fine_tune(tiny_model, tmp_path_factory):
    """Runs fine-tuning on twelve rows, four a step, in a folder and with the given changes."""
    file = tmp_path_factory.mktemp("rows") / "twelve.jsonl"
    rows = [
        [{"role": "user", "content": "P _ G"}, {"role": "assistant", "content": f"walk {i}"}]
        for i in range(12)
    ]
    file.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in rows))
    own = {
        "exp_name": "sft",
        "train_files": [str(file)],
        "val_files": [str(file)],
        "eval_steps": 2,
        "num_epochs": 2,
    }

    def fine_tune(folder, **changes):
        return run(
            sft_config(
                tiny_model, folder, **own | {"save_steps": 1, "max_ckpt_to_keep": 0} | training() | changes
            ),
            build_sft,
        )

    return fine_tune


@pytest.fixture(scope="module")
def fine_tuned(fine_tune, tmp_path_factory):
    """Six steps that were never stopped."""
    return fine_tune(tmp_path_factory.mktemp("fine_tuned"))


def test_fine_tuning_goes_on_as_well(fine_tune, fine_tuned, tmp_path):
    resumed = fine_tune(tmp_path, resume_from_checkpoint=str(fine_tuned.checkpoints.path / "checkpoint-4"))
    assert measured(resumed.folder) == measured(fine_tuned.folder)
    assert_same_weights(resumed.checkpoints.newest, fine_tuned.checkpoints.newest)


@pytest.mark.extra
def test_fine_tuning_goes_on_with_another_number_of_devices_if_its_steps_keep_their_size(
    fine_tune, fine_tuned, tmp_path
):
    def cut(size, num=1):
        return training(1e-3, size, gradient_accumulation_steps=num)

    fine_tune(tmp_path, max_steps=2, device_mapping=[0, 1], num_gpus_per_node=2, **cut(2))
    with pytest.raises(
        CheckpointError, match=r"config:\n  - samples of an optimiser step: 4 → 2 \(per_device.*\)\nSet them"
    ):
        fine_tune(tmp_path, max_steps=3, resume_from_checkpoint=True, **cut(2))
    fine_tune(tmp_path, max_steps=3, resume_from_checkpoint=True, **cut(2, 2))
    resumed = fine_tune(tmp_path, resume_from_checkpoint=True, **cut(4))
    losses = [[row["sft/loss"] for row in measured(made.folder)[:6]] for made in (fine_tuned, resumed)]
    assert len(losses[0]) == 6 and losses[1] == pytest.approx(losses[0], rel=1e-3)
