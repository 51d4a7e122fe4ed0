"""A pipeline whose parts hang ends with an error that names them."""

from __future__ import annotations

import signal
import sys
import threading
import time

import pytest
from messages import says
from odd_envs import block_for_ever, spin_for_ever
from small_runs import run_small, small_config

from turnwise.errors import DeadlineError, EnvironmentFault, RolloutError
from turnwise.examine.envs import try_environment
from turnwise.inference.embedded.server import EmbeddedServer
from turnwise.training.torch_strategy import TorchStrategy

LETTERS, STUCK = "toy_envs:LettersEnv", "odd_envs:StuckEnv"


def config_of(tiny_model, tmp_path, env_type=LETTERS, env_config=None, num_per_worker=0, **deadlines):
    # A worker of a busy machine takes a while to make an environment.
    timeout_s = 3.0 if num_per_worker else 0.1
    limits = {
        "env_step_timeout_s": timeout_s,
        "max_env_retries": 0,
        "max_env_num_per_worker": num_per_worker,
    }
    toy = {"env_type": env_type, "env_config": env_config or {}, "max_steps": 2, "max_tokens_per_step": 4}
    return small_config(
        tiny_model,
        tmp_path,
        max_steps=1,
        rollout_batch_size=4,
        parity_max_logprob_diff=1.0,
        entropy_loss_coef=0.001,  # Without it an update whose episodes all score alike is left out.
        deadlines=deadlines,
        train_env_manager={"group_size": 2} | limits,
        val_env_manager=limits,
        custom_envs={"Toy": toy},
    )


def train(*arguments, **deadlines):
    run_small(config_of(*arguments, **deadlines))


@pytest.fixture(autouse=True)
def nothing_is_left():
    before, threads = signal.getsignal(signal.SIGUSR2), set(threading.enumerate())
    yield
    assert signal.getsignal(signal.SIGUSR2) == before
    assert "watchdog" not in {thread.name for thread in set(threading.enumerate()) - threads}


@pytest.mark.parametrize(
    ("how", "num_per_worker"),
    [("block", 0), ("block", 16), ("await", 0), ("thread", 0), ("spin", 0), ("spin", 16)],
)
def test_an_environment_that_never_returns(tiny_model, tmp_path, how, num_per_worker):
    message = (
        r"(?s)max_failed_fraction.*an episode of Toy waited [\d.]+ s for StuckEnv.step; "
        "raise env_step_timeout_s"
    )
    with pytest.raises(RolloutError, match=message) as caught:
        train(tiny_model, tmp_path, STUCK, {"how": how}, num_per_worker)
    assert "_hang" in str(caught.value) or "_for_ever" in str(caught.value)
    for _ in range(100):
        if not is_spinning():
            break
        time.sleep(0.05)
    assert not is_spinning(), "a busy loop that is left behind would take half of the process's time"


def is_spinning():
    return any(frame.f_code is spin_for_ever.__code__ for frame in sys._current_frames().values())


def test_an_environment_whose_constructor_never_returns(tiny_model, tmp_path):
    with pytest.raises(
        EnvironmentFault, match=r"(?s)waited 0.1 s for the environment's constructor.*block_for_ever"
    ):
        try_environment(config_of(tiny_model, tmp_path, STUCK, {"where": "constructor"}), "Toy", "train")


def test_an_engine_that_never_returns(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(EmbeddedServer, "_step", lambda self: block_for_ever())
    with pytest.raises(DeadlineError, match=says("event loop", "1 s")) as caught:
        train(tiny_model, tmp_path, env_s=1.0)
    assert "MainThread in task 'embedded server'" in str(caught.value) and "block_for_ever" in str(
        caught.value
    )


def test_a_trainer_that_never_returns(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(TorchStrategy, "train_step", lambda *_, **__: block_for_ever())
    with pytest.raises(DeadlineError, match=r"(?s)waited 2 s for actor_train.train_step.*block_for_ever"):
        train(tiny_model, tmp_path, train_s=2.0)


def test_a_weight_update_that_never_returns(tiny_model, tmp_path, monkeypatch):
    async def resume(*_, **__):
        block_for_ever()

    monkeypatch.setattr(EmbeddedServer, "resume", resume)
    with pytest.raises(
        DeadlineError, match=r"(?s)waited 1 s for the weights of version 0 to reach.*block_for_ever"
    ):
        train(tiny_model, tmp_path, weights_s=1.0)
