"""Whole runs in which rollouts go on while the trainer works."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
from disturbed import interrupted
from messages import mentions, says
from small_runs import LETTERS, assert_same_weights, built, played, run_small, small_config, training
from toy_envs import LettersEnv

from turnwise.algorithms.token_estimator import AgenticReinforce
from turnwise.assemble.run_table import settings_table
from turnwise.cluster.fork_server import prepare_processes
from turnwise.errors import ConfigError, DataError, DeadlineError, WorkerError
from turnwise.inference.embedded.engine import Engine
from turnwise.models.cpu.build import load_kernels
from turnwise.tracking.jsonl import read_metrics


@pytest.fixture(autouse=True)
def no_trainer_is_left():
    before = set(threading.enumerate())
    yield
    assert "trainer" not in {thread.name for thread in set(threading.enumerate()) - before}


OWN = {
    "exp_name": "ahead",
    "max_steps": 4,
    "save_steps": 0,
    "val_batch_size": 2,
    "async_generation_ratio": 1,
    "actor_train": training(batch_size=8),
    "train_env_manager": {"num_env_groups": 4, "group_size": 2},
}


@pytest.fixture
def make_config(tiny_model, tmp_path):
    return partial(small_config, tiny_model, tmp_path / "runs", **OWN)


def staleness(pipeline):
    return [
        row["actor/staleness_max"]
        for row in read_metrics(pipeline.folder.metrics)
        if "actor/staleness_max" in row
    ]


def assert_trained_on_once(pipeline):
    """Eight episodes in each of four steps, none of them twice."""
    episodes = [(row["task"]["id"], row["sibling"]) for row in played(pipeline.folder) if not row["rejected"]]
    assert len(episodes) == len(set(episodes)) == 4 * 8


def num_parts(pipeline):
    """Number of parts of each step."""
    events = [json.loads(line) for line in pipeline.folder.schedule_log.read_text().splitlines()]
    return [len(event.get("parts", [0])) for event in events if "batch" in event]


HESITANT = {
    "Letters": LETTERS | {"env_type": "odd_envs:HesitantEnv", "max_steps": 3, "max_tokens_per_step": 12}
}


class Uneven(LettersEnv):
    """Every other episode takes five turns, the others one."""

    num_made = 0

    def reset(self, *, seed=None):
        type(self).num_made += 1
        self.num_left = 5 if self.num_made % 2 else 1
        return super().reset(seed=seed)

    def step(self, action):
        observation, reward, _, _, info = super().step(action)
        self.num_left -= 1
        return observation, reward, self.num_left == 0, False, info


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(
            {"train_env_manager": {"num_env_groups": 4, "group_size": 2, "group_size_redundancy": 2}},
            marks=pytest.mark.extra,
        ),
        {"train_env_manager": {"num_env_groups": 8, "group_size": 2}, "stale_groups": "drop"},
    ],
)
def test_episodes_that_are_given_up_leave_nothing_in_the_engine(make_config, changes):
    uneven = LETTERS | {"env_type": f"{__name__}:Uneven", "max_steps": 5}
    with built(make_config(**changes, custom_envs={"Letters": uneven})) as pipeline:
        [server] = pipeline.actor_infer.servers
        aborted, abort = [], server._engine.abort

        def counted(request_id):
            finished = abort(request_id)
            aborted.extend([request_id] if finished is not None else [])
            return finished

        server._engine.abort = counted
        pipeline.run()
    assert_trained_on_once(pipeline)
    assert aborted or "stale_groups" in changes, (
        "slower siblings were being sampled when the others had ended"
    )
    # The parity gate asks under the same few names again and again.
    left = [name for name in server._engine._scheduler.slots if not name.startswith("parity/")]
    assert not left and not server._futures and not server._engine.num_running


def test_the_table_says_how_the_threads_are_split(make_config):
    with built(make_config(cpu_split={"train": 2, "rollout": 1})) as pipeline:
        table = settings_table(pipeline).text()
    assert "2 train and 1 play" in table
    assert mentions(table, "weights", "finished", "as they end")
    assert mentions(table, "up to 1 batches", "oldest")
    assert "a copy of the parameters" in table


@pytest.fixture
def slow_engine(monkeypatch):
    """Steps that take longer than the trainer does, so that something is in flight whenever weights
    change."""
    step = Engine.step

    def slow_step(self):
        time.sleep(0.003)
        return step(self)

    monkeypatch.setattr(Engine, "step", slow_step)


@pytest.mark.parametrize(
    "how",
    [
        "abort_continue",
        *(pytest.param(how, marks=pytest.mark.extra) for how in ("finish", "abort_restart", "keep")),
    ],
)
def test_responses_over_a_weight_update_know_their_versions(make_config, slow_engine, how):
    envs = {"Letters": LETTERS | {"max_tokens_per_step": 60}}
    pipeline = run_small(make_config(on_weight_update=how, custom_envs=envs, entropy_loss_coef=0.001))
    turns = [turn for row in played(pipeline.folder) for turn in row["turns"]]
    assert all(sum(count for _, count in turn["versions"]) == len(turn["response_ids"]) for turn in turns)
    is_mixed = any(len(turn["versions"]) > 1 for turn in turns)
    assert is_mixed == (how in ("abort_continue", "keep"))
    assert max(staleness(pipeline)) == 1


def test_a_run_that_goes_on_trains_on_everything_once(make_config):
    run_small(make_config(max_steps=2, save_steps=1, on_weight_update="keep"))
    resumed = run_small(make_config(resume_from_checkpoint=True, on_weight_update="keep"))
    assert_trained_on_once(resumed)
    assert max(staleness(resumed)) == 1


@pytest.mark.parametrize("phase", ["rollout", "old_log_probs_values", "train"])
def test_ctrl_c_in_any_phase_loses_nothing_and_repeats_nothing(make_config, phase):
    interrupted(make_config(), phase)
    resumed = run_small(make_config(resume_from_checkpoint=True))
    assert_trained_on_once(resumed)
    assert max(staleness(resumed)) == 1


def without_times(pipeline):
    metrics = read_metrics(pipeline.folder.metrics)
    rows = [{k: v for k, v in row.items() if not k.startswith(("time/", "system/"))} for row in metrics]
    return played(pipeline.folder), rows


@pytest.mark.parametrize(
    ("how", "ratio", "is_streamed"),
    [
        pytest.param("finish", 1, True, marks=pytest.mark.extra),
        pytest.param("abort_continue", 2, True, marks=pytest.mark.extra),
        ("keep", 2, False),
    ],
)
def test_steps_train_within_the_bound_and_are_repeated_bit_by_bit(
    make_config, slow_engine, how, ratio, is_streamed
):
    """Validation plays beside the episodes that go on."""
    changes = {
        "async_generation_ratio": ratio,
        "on_weight_update": how,
        "eval_steps": 2,
        "stream_training": is_streamed,
    }
    config = make_config(custom_envs=HESITANT, **changes)
    first = run_small(config)
    for _ in range(
        5 if is_streamed else 0
    ):  # on a loaded machine a trainer may find all groups of a batch ended
        first = first if max(num_parts(first)) > 1 else run_small(config)
    assert max(staleness(first)) in range(1, ratio + 1)
    assert (max(num_parts(first)) > 1) == is_streamed
    rows = read_metrics(first.folder.metrics)
    assert [row["actor/backward_steps"] for row in rows if "actor/backward_steps" in row] == [1.0] * 4
    assert sum("val/score/mean" in row for row in rows) == 3
    assert_trained_on_once(first)
    again = run_small(config, repeated_run=first.folder.path)
    assert num_parts(again) == num_parts(first)
    assert without_times(again) == without_times(first)
    assert_same_weights(again.checkpoints.newest, first.checkpoints.newest)
    others = (without_times(run_small(config)) for _ in range(5))
    assert how != "finish" or any(other != without_times(first) for other in others), (
        "time decides where no record does"
    )


def test_refills_for_groups_that_a_filter_rejects_are_repeated(make_config):
    config = make_config(group_filter="non_zero_variance", max_refill_factor=3.0, async_generation_ratio=2)
    first = run_small(config)
    assert {row["rejected"] for row in played(first.folder)} >= {None, "filtered"}, (
        "the filter had something to do"
    )
    assert without_times(run_small(config, repeated_run=first.folder.path)) == without_times(first)


def test_a_run_that_was_interrupted_in_a_validation_is_repeated_up_to_it(make_config):
    config = make_config(eval_steps=1)
    folder = interrupted(config, "val")
    with pytest.raises(DataError, match=says("complete validation", "2 batches")):
        run_small(config, repeated_run=folder.path)


def test_a_replay_by_other_kernels_or_on_another_split_of_the_threads_is_refused(make_config, monkeypatch):
    first = run_small(make_config(max_steps=1, cpu_split={"rollout": 1}))

    def assert_refused(message, **split):
        with pytest.raises(DataError, match=message):
            run_small(
                make_config(max_steps=1, cpu_split={"rollout": 1} | split), repeated_run=first.folder.path
            )

    assert_refused(r"recorded with threads \d+ to train and 1 to play, and here it is 9 to train", train=9)
    is_compiled = load_kernels() is not None
    with monkeypatch.context() as patch:
        patch.setattr("turnwise.assemble.cluster.load_kernels", lambda: None if is_compiled else object())
        assert_refused(r"recorded with kernels (torch|the library)'s, and here it is")
    if is_compiled:
        monkeypatch.setattr("turnwise.inference.embedded.fused_runner.load_kernels", lambda: None)
        assert_refused(r"own kernels.*, and here it is .*fused forward pass")


def test_what_cannot_be_repeated_is_refused(make_config, tmp_path):
    for changes, message in (
        ({"async_generation_ratio": 0}, "trained synchronously"),
        ({"stale_groups": "drop"}, "cancelled episodes"),
        ({"actor_infer": {"strategy_args": {"strategy_name": "hf"}}}, "only the embedded server"),
        ({}, "holds no schedule to replay"),
    ):
        with pytest.raises(DataError, match=message):
            run_small(make_config(**changes), repeated_run=tmp_path)


def processes():
    """Ids of the trainers' processes that there are."""
    fork_server = prepare_processes()._process.pid
    return [
        int(child) for child in Path(f"/proc/{fork_server}/task/{fork_server}/children").read_text().split()
    ]


def signal_trainer(number):
    [trainer] = processes()
    os.kill(trainer, number)


SILENT = r"(?s:.*)the trainer's process:\n    it doesn't say"


@pytest.mark.parametrize(
    ("phase", "number", "deadlines", "error", "message"),
    [
        pytest.param(
            "old_log_probs_values",
            signal.SIGSTOP,
            {"train_s": 8.0},  # setting up the trainer's process has to be faster, too
            DeadlineError,
            rf"8 s for actor_train.\w+; raise deadlines.train_s{SILENT}",
            marks=pytest.mark.extra,
        ),
        (
            "model_update",
            signal.SIGSTOP,
            {"weights_s": 4.0},
            DeadlineError,
            rf"4 s for the weights of version 2 .*deadlines.weights_s{SILENT}",
        ),
        (
            "train",
            signal.SIGKILL,
            {},
            WorkerError,
            r"actor_train.\w+: the trainer's process has ended: something killed it",
        ),
    ],
)
def test_a_trainer_that_does_not_answer_ends_the_run_by_name(
    make_config, monkeypatch, phase, number, deadlines, error, message
):
    monkeypatch.setattr("turnwise.cluster.process_life._STACK_S", 0.1)  # what stands still never says where
    config = make_config(deadlines=deadlines, save_steps=1)
    fork_server = prepare_processes(["turnwise.assemble.strategies"])
    interrupted(config, phase, error, partial(signal_trainer, number), message)
    assert not processes()
    assert prepare_processes() is fork_server
    assert_trained_on_once(run_small(make_config(resume_from_checkpoint=True)))


def test_steps_that_a_lost_trainer_had_are_said_to_be_lost(make_config, capfd):
    interrupted(make_config(), "old_log_probs_values", WorkerError, partial(signal_trainer, signal.SIGKILL))
    assert mentions(capfd.readouterr().err, "actor_train.save", "trainer's process")


@pytest.mark.parametrize(
    ("estimator", "reason"),
    [
        ("WithLock", r"loss\.hook\.lock \(lock\) can't"),
        ("OnlyHere", r"that can't import it \(ModuleNotFoundError\).*No module named 'not_installed_there'"),
    ],
)
def test_a_loss_that_cannot_be_sent_or_imported_there_is_refused_at_the_start(make_config, estimator, reason):
    sentence = rf"adv_estimator .*{estimator}: its loss .* can't be sent to the trainer's process.*: {reason}"
    with pytest.raises(ConfigError, match=sentence):
        run_small(make_config(adv_estimator=f"{__name__}:{estimator}"))
    assert not processes()


ADAPTERS = {"lora_rank": 2, "lora_alpha": 4, "lora_dropout": 0.1, "lora_target": "all"}


def test_adapters_and_a_critic_are_trained_there_too(make_config):
    config = make_config(adv_estimator="gae", actor_train=training(1e-2, 8) | {"model_args": ADAPTERS})
    first = run_small(config)
    assert max(staleness(first)) == 1
    assert without_times(run_small(config, repeated_run=first.folder.path)) == without_times(first)


class WithLock(AgenticReinforce):
    def __init__(self, *args):
        super().__init__(*args)
        self.loss.hook = SimpleNamespace(lock=threading.Lock())


class OfAModule:
    def __reduce__(self):
        return import_module, ("not_installed_there",)


class OnlyHere(AgenticReinforce):
    def __init__(self, *args):
        super().__init__(*args)
        self.loss.hook = OfAModule()
