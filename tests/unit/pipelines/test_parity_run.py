"""The parity gate in a whole run: what it logs, that its bound holds, and that it leaves the run as it would
be without it."""

from __future__ import annotations

import pytest
from messages import says
from small_runs import played, run_small, small_config, training
from toy_envs import LettersEnv

from turnwise.errors import ParityError, RolloutError
from turnwise.tracking.jsonl import read_metrics


class NoGate:
    def check(self, version):
        return []


def take_away(pipeline):
    pipeline.parity_gate = NoGate()


@pytest.fixture
def run(tiny_model, tmp_path):
    def run(change=lambda pipeline: None, **changes):
        own = {"max_steps": 3, "save_steps": 0, "actor_train": training(1e-2, 8)}
        return run_small(small_config(tiny_model, tmp_path, **own | changes), change).folder

    return run


def test_the_run_is_what_it_would_be_without_the_gate(run):
    gated, free = run(exp_name="gated"), run(take_away, exp_name="free")
    assert len(played(gated)) == 24
    assert played(gated) == played(free)
    for with_gate, without in zip(read_metrics(gated.metrics), read_metrics(free.metrics), strict=True):
        assert 0 < with_gate["parity/logprob_diff_mean"] < 1e-6 and with_gate["parity/num_tokens"] == 16
        same = {name for name in without if not name.startswith(("time/", "system/"))}
        assert {name: with_gate[name] for name in same} == {name: without[name] for name in same}


def test_the_bound_stops_the_run(run):
    with pytest.raises(ParityError, match="parity_max_logprob_diff is 1e-12"):
        run(parity_max_logprob_diff=1e-12)


def lose_updates(pipeline):
    give = pipeline.weight_transfer.update

    class Lost:
        async def update(self, version):
            return await give(version) if version == 0 else []

    pipeline.weight_transfer = Lost()


def test_a_sampler_that_misses_an_update_stops_the_run(run):
    with pytest.raises(ParityError, match=says("Cause", "weights", "version")):
        run(lose_updates, actor_infer={"model_args": {"dtype": "bf16"}}, parity_max_logprob_diff=0.1)


class NoStart(LettersEnv):
    def reset(self, *, seed=None):
        raise RuntimeError("no such maze")


def test_an_environment_that_cannot_start_is_left_to_the_rollouts(run):
    with pytest.raises(RolloutError, match="no such maze"):
        run(custom_envs={"Maze": {"env_type": f"{__name__}:NoStart"}})
