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
from small_runs import built, measured, played, run_small, small_config, training
from toy_model import toy_model

from turnwise.assemble import agentic
from turnwise.assemble.agentic import build_agentic
from turnwise.assemble.run import start_run
from turnwise.config.place import place
from turnwise.errors import ConfigError, DataError, ReplicasDeadError
from turnwise.examine.examined import examine
from turnwise.inference import restarts
from turnwise.runtime.machine import Machine, Node
from turnwise.tracking.jsonl import read_metrics
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
        DataError, match="2 inference replicas in processes of their own, which follow no schedule"
    ):
        run_small(make_config("again", actor_infer=TWO, async_generation_ratio=1), repeated_run=folder.path)


NODES = Machine((Node(1, name="first"), Node(1, name="second"), Node(2, name="third")))


@pytest.mark.parametrize(
    "ahead",
    [{}, pytest.param({"async_generation_ratio": 1}, marks=pytest.mark.extra)],
    ids=["local", "ahead"],
)
def test_weights_reach_replicas_of_other_nodes_once_a_node_and_over_tcp_alone(make_config, ahead):
    """The nodes have names alone: all processes are here, and reach each other through loopback."""
    config = make_config(
        "nodes",
        num_gpus_per_node=None,
        cluster={"name": "process"} if ahead else {},
        actor_infer={"device_mapping": [1, 2, 3], "model_args": {"dtype": "bf16"}},
        parity_max_logprob_diff=0.5,
        **ahead,
    )
    with built(config, placement=place(config, NODES)) as pipeline:
        transfer = pipeline.weight_transfer
        assert transfer.describe() == (
            "from first over gloo to second, third, then through shared memory: one copy in bf16 a node"
        )
        servers = pipeline.actor_infer.servers
        assert [server.node for server in servers] == ["second", "third", "third"]
        pipeline.run()
        metrics = {metric.name: metric.value for metric in pipeline.event_loop.run(transfer.update(3))}
        size = sum(tensor.nbytes for _, tensor in transfer.sender.ranks.trained_weights())
        assert metrics["weights/copies"] == 3 and metrics["weights/bytes"] == 3 * size / 2
        copies = transfer.sender._sent.by_node
        pids = {node: int(copy.path.split("/")[2]) for node, copy in copies.items() if node != "first"}
        assert pids == {server.node: server.process.life.process_id for server in servers[:2]}
        kill(servers[0])
        kill(servers[1])
        prompt, sampling = list(range(5, 45)), SamplingParams(12, seed=3)
        for name in ("a", "b"):
            pipeline.event_loop.run(pipeline.actor_infer.generate(prompt, sampling, name))


def kill(server):
    os.kill(server.process.life.process_id, signal.SIGKILL)


@pytest.mark.extra
@pytest.mark.parametrize("num_killed", [1, 2])
def test_a_killed_replica_is_started_again_with_the_current_weights(make_config, caplog, num_killed):
    with built(make_config("dies", actor_infer=TWO)) as pipeline:
        killed = pipeline.actor_infer.servers[:num_killed]
        list(map(kill, killed))
        pipeline.run()
        pipeline.event_loop.run(pipeline.actor_infer.restarts.next_end())
        pipeline.event_loop.run(pipeline.weight_transfer.update(3))
        trained = pipeline.actor_train.workers.worker.model
        prompt, sampling = list(range(5, 45)), SamplingParams(12, seed=3)
        assert len(pipeline.actor_infer.servers) == 2
        for server in pipeline.actor_infer.servers:
            assert server not in killed
            completion = pipeline.event_loop.run(server.generate(prompt, sampling, "asked"))
            expected = reference_logprobs(trained, prompt, completion.token_ids, sampling)
            assert np.abs(completion.logprobs - expected).max() <= 1e-4
            assert completion.versions[0].version == 3
    assert "Inference replica 0 is dead" in caplog.text and "SIGKILL" in caplog.text
    assert "is started again" in caplog.text and "serves again" in caplog.text
    rows = measured(pipeline.folder)
    assert len([row for row in rows if "actor/backward_steps" in row]) == 3
    assert sum(row.get("system/replica_restarts", 0) for row in rows) <= num_killed


@pytest.mark.extra
def test_a_run_whose_replicas_die_too_often_ends_with_the_reason(make_config, monkeypatch):
    monkeypatch.setattr(restarts, "MAX_DEATHS", 1)
    with pytest.raises(ReplicasDeadError, match=r"every inference replica is dead.*SIGKILL"):
        run_small(
            make_config("all-die", actor_infer=TWO),
            lambda pipeline: list(map(kill, pipeline.actor_infer.servers)),
        )


@pytest.mark.extra
@pytest.mark.parametrize("on_weight_update", ["finish", "abort_continue"])
def test_a_replica_on_the_trainers_device_makes_room_in_each_step(make_config, on_weight_update):
    trainer = training(5e-3, 8) | {"device_mapping": [0]}
    config = make_config(
        "lent",
        actor_train=trainer,
        actor_infer=TWO,
        async_generation_ratio=1,
        on_weight_update=on_weight_update,
    )
    assert not config.is_streamed
    with closing(build_agentic(examine(config), start_run(config))) as pipeline:
        away = []
        train_on = pipeline.actor_train.train_step

        def noted(*args, **options):
            result = train_on(*args, **options)
            away.append([server.name for server in pipeline.actor_infer.servers])
            return result

        pipeline.actor_train.train_step = noted
        pipeline.run()
        servers = [server.name for server in pipeline.actor_infer.servers]
    assert len(servers) == 2 and away == [servers[1:]] * 3
    steps = measured(pipeline.folder)
    times = read_metrics(pipeline.folder.metrics)
    assert all(row["time/lent_s"] > 0 for row in times[1:])
    for device in (0, 1):
        assert all(0 <= row[f"system/device_idle/{device}"] < 1 for row in times[1:])
    assert all(row["parity/logprob_diff_max"] <= 1e-3 for row in steps)
    assert all(row["actor/staleness_max"] <= 1 for row in steps)
    # One of the two replicas gets each version when it comes back, which counts too.
    assert len({row["weights/copied_bytes"] for row in times}) == 1


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
