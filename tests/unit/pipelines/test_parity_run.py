"""The parity gate in a whole run: what it logs, that its bound holds, and that it leaves the run as it would be without it."""

from __future__ import annotations

import pytest
from small_runs import played, small_config, training

from turnwise.build.agentic import build_agentic
from turnwise.build.run import start_run
from turnwise.errors import ParityError, RolloutError
from turnwise.tracking.jsonl import read_metrics


class NoGate:
    def check(self, version):
        return []


def make_pipeline(tiny_model, tmp_path, **changes):
    own = {"max_steps": 3, "save_steps": 0, "actor_train": training(1e-2, 8)}
    config = small_config(tiny_model, tmp_path, **own | changes)
    return build_agentic(config, start_run(config))


def run(pipeline):
    try:
        pipeline.run()
    finally:
        pipeline.close()
    return pipeline.folder


def test_the_run_is_what_it_would_be_without_the_gate(tiny_model, tmp_path):
    gated = run(make_pipeline(tiny_model, tmp_path, exp_name="gated"))
    pipeline = make_pipeline(tiny_model, tmp_path, exp_name="free")
    pipeline.parity_gate = NoGate()
    free = run(pipeline)
    assert len(played(gated)) == 24
    assert played(gated) == played(free)
    for with_gate, without in zip(read_metrics(gated.metrics), read_metrics(free.metrics), strict=True):
        assert 0 < with_gate["parity/logprob_diff_mean"] < 1e-6 and with_gate["parity/num_tokens"] == 16
        same = {name for name in without if not name.startswith(("time/", "system/"))}
        assert {name: with_gate[name] for name in same} == {name: without[name] for name in same}


def test_the_bound_stops_the_run(tiny_model, tmp_path):
    with pytest.raises(ParityError, match="parity_max_logprob_diff is 1e-12"):
        run(make_pipeline(tiny_model, tmp_path, parity_max_logprob_diff=1e-12))


def test_a_sampler_that_misses_an_update_stops_the_run(tiny_model, tmp_path):
    pipeline = make_pipeline(tiny_model, tmp_path, actor_infer={"model_args": {"dtype": "bf16"}}, parity_max_logprob_diff=0.1)
    give = pipeline.weight_transfer.update

    class Lost:
        async def update(self, version):
            return await give(version) if version == 0 else []

    pipeline.weight_transfer = Lost()
    with pytest.raises(ParityError, match="Cause: weights not transferred since version"):
        run(pipeline)


def test_an_environment_that_cannot_start_is_left_to_the_rollouts(tiny_model, tmp_path, monkeypatch):
    (tmp_path / "mazes.py").write_text(
        "from turnwise.envs.base import TextEnv\n\n\n"
        "class NoStart(TextEnv):\n"
        "    metric_reductions = {}\n\n"
        "    def reset(self, *, seed=None):\n"
        "        raise RuntimeError('no such maze')\n\n"
        "    def step(self, action):\n"
        "        raise AssertionError('never reached')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    pipeline = make_pipeline(tiny_model, tmp_path, custom_envs={"Maze": {"env_type": "mazes:NoStart"}})
    with pytest.raises(RolloutError, match="no such maze"):
        run(pipeline)
