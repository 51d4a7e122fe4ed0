"""Several embedded replicas in processes of their own, against one in this process."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from contextlib import closing

import numpy as np
import pytest
from server_contract import reference_logprobs
from server_factories import server_in_a_process
from small_runs import measured, played, run_small, small_config, training
from toy_model import toy_model

from turnwise.assemble import agentic
from turnwise.assemble.agentic import build_agentic
from turnwise.assemble.run import start_run
from turnwise.errors import ConfigError, DataError, ReplicasDeadError
from turnwise.examine.examined import examine
from turnwise.types import SamplingParams

TWO = {"device_mapping": [0, 1]}


@pytest.fixture
def make_config(tiny_model, tmp_path):
    def make(name, **changes):
        own = {
            "exp_name": name,
            "max_steps": 3,
            "save_steps": 0,
            "num_gpus_per_node": 2,
            "actor_train": training(5e-3, 8),
        }
        return small_config(tiny_model, tmp_path / "runs", **own | changes)

    return make


def count_episodes(pipeline):
    """The contexts that each replica has served, by its name."""
    served = Counter()
    for server in pipeline.actor_infer.servers:
        release = server.release

        async def counted(request_id, server=server, release=release):
            served[server.name] += 1
            await release(request_id)

        server.release = counted
    return served


def test_two_replicas_play_what_one_plays_each_a_fair_share_and_follow_the_trainer(make_config):
    one = run_small(make_config("one"))
    config = make_config("two", actor_infer=TWO)
    with closing(build_agentic(examine(config), start_run(config))) as two:
        served = count_episodes(two)
        two.run()
        two.event_loop.run(two.weight_transfer.update(3))
        trained = two.actor_train.workers.worker.model
        prompt, sampling = list(range(5, 45)), SamplingParams(12, seed=3)
        for server in two.actor_infer.servers:
            completion = two.event_loop.run(server.generate(prompt, sampling, "asked"))
            expected = reference_logprobs(trained, prompt, completion.token_ids, sampling)
            assert np.abs(completion.logprobs - expected).max() <= 1e-4
            assert completion.versions[0].version == 3
    assert (
        len(served) == 2
        and min(served.values()) >= 0.25 * sum(served.values())
        and sum(served.values()) >= 24
    )
    tokens = [
        [[turn["response_ids"] for turn in row["turns"]] for row in played(run.folder)] for run in (one, two)
    ]
    assert tokens[0] == tokens[1]
    for before, after in zip(measured(one.folder), measured(two.folder), strict=True):
        for name in ("actor/loss", "actor/grad_norm", "train/score_mean"):
            assert name not in before or after[name] == pytest.approx(before[name], rel=1e-3, abs=1e-6)
    assert all(row.get("weights/copied_bytes", 0) == 0 for row in measured(one.folder))


@pytest.mark.extra
def test_they_serve_a_trainer_in_another_process_ahead_of_it(make_config):
    config = make_config(
        "ahead", actor_infer=TWO, async_generation_ratio=1, on_weight_update="abort_continue"
    )
    folder = run_small(config).folder
    assert [row["actor/skipped_steps"] for row in measured(folder) if "actor/skipped_steps" in row] == [
        0.0
    ] * 3
    assert max(row.get("parity/logprob_diff_max", 0.0) for row in measured(folder)) < 1e-4
    with pytest.raises(
        DataError, match="2 inference replicas sampled in their own processes, which follow no schedule"
    ):
        run_small(make_config("again", actor_infer=TWO, async_generation_ratio=1), repeated_run=folder.path)


def kill(server):
    os.kill(server.process.life.process_id, signal.SIGKILL)


@pytest.mark.extra
def test_a_killed_replica_is_left_and_the_run_goes_on(make_config, caplog):
    pipeline = run_small(
        make_config("one-dies", actor_infer=TWO), lambda pipeline: kill(pipeline.actor_infer.servers[0])
    )
    assert [server.name for server in pipeline.actor_infer.servers] == ["inference replica 1"]
    assert "Inference replica 0 is dead" in caplog.text and "SIGKILL" in caplog.text
    assert "isn't started again: 1 replica left for its requests" in caplog.text
    assert len([row for row in measured(pipeline.folder) if "actor/backward_steps" in row]) == 3


@pytest.mark.extra
def test_a_run_without_replicas_ends_with_the_reason(make_config):
    with pytest.raises(ReplicasDeadError, match=r"every inference replica is dead.*SIGKILL"):
        run_small(
            make_config("all-die", actor_infer=TWO),
            lambda pipeline: list(map(kill, pipeline.actor_infer.servers)),
        )


def test_a_device_that_is_not_there_is_named(make_config):
    with pytest.raises(
        ConfigError, match=r"actor_infer.device_mapping names device 5, and this machine has 2 slots"
    ):
        keys = {"cluster": {"name": "process"}, "actor_infer": {"device_mapping": [0, 5]}}
        run_small(make_config("missing", **keys))


def test_replicas_under_a_launcher_are_refused(make_config, monkeypatch):
    """Before a model is loaded."""
    monkeypatch.setattr(agentic, "open_rollout_context", None)
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        ConfigError, match="a launcher started this run: servers in their own processes need a run without"
    ):
        run_small(make_config("launched", actor_infer=TWO))


def test_requests_in_flight_fail_when_a_process_dies():
    async def scenario() -> None:
        server = server_in_a_process(toy_model(), max_length=96)
        task, left = (
            asyncio.create_task(server.generate([1, 2, 3], SamplingParams(60), name))
            for name in ("c", "left")
        )
        await server.let_it_sample()
        kill(server)
        end = time.monotonic() + 60
        while not server.is_gone and time.monotonic() < end:
            time.sleep(0.01)  # blocks the event loop, so that `left` doesn't learn of the end
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        with pytest.raises(ConnectionError, match=r"the replica has ended: something killed it \(SIGKILL\)"):
            await task
        with pytest.raises(ConnectionError, match="SIGKILL"):
            await server.resume(1)
        await server.close()

    asyncio.run(scenario())
