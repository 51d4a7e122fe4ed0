"""The parity gate in a whole run: what it logs, that its bound holds, and that it leaves the run as it would be without it."""

from __future__ import annotations

import json

import pytest

from turnwise.build.agentic import build_agentic
from turnwise.build.run import start_run
from turnwise.config import AgenticConfig, parse_config
from turnwise.errors import ParityError, RolloutError
from turnwise.tracking.jsonl import read_metrics

LETTERS = {
    "env_type": "turnwise.testing.toy_envs:LettersEnv",
    "max_steps": 2,
    "max_tokens_per_step": 4,
    "agent_template": "{observation}",
    "action_pattern": None,
}


class NoGate:
    def check(self, version):
        return []


def make_pipeline(tiny_model, tmp_path, **changes):
    values = {
        "pretrain": str(tiny_model),
        "output_dir": str(tmp_path),
        "max_steps": 3,
        "save_steps": 0,
        "rollout_batch_size": 8,
        "sequence_length": 256,
        "track_with": [],
        "actor_train": {"training_args": {"learning_rate": 1e-2, "per_device_train_batch_size": 8}},
        "train_env_manager": {"num_env_groups": 2, "group_size": 4},
        "custom_envs": {"Letters": LETTERS},
    }
    config, _ = parse_config(values | changes, AgenticConfig)
    return build_agentic(config, start_run(config))


def run(pipeline):
    try:
        pipeline.run()
    finally:
        pipeline.close()
    return pipeline.folder


def played(folder):
    """The trajectories of a run without how long they took."""
    rows = [json.loads(line) for line in folder.rollouts.read_text().splitlines()]
    for turn in (turn for row in rows for turn in row["turns"]):
        del turn["generate_s"], turn["step_s"]
    return rows


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
