"""A run whose processes are on two machines, which are two network namespaces here: nothing meets on
loopback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from network_nodes import ADDRESSES, NoNamespacesError, start, two_nodes

from turnwise.models.make import make_model

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "examples" / "frozen_lake" / "agentic.yaml"
TEXT = "Walk to the goal G and avoid the holes O. You are at row 0, column 1. Up Down Left Right user system"
KEYS = {
    "max_steps": 3,
    "eval_steps": 0,
    "save_steps": 0,
    "rollout_batch_size": 16,
    "train_env_manager.num_env_groups": 2,
    "custom_envs.FrozenLake.max_steps": 3,
    "entropy_loss_coef": 0.1,
    "actor_train.training_args.warmup_steps": 0,
    "deterministic": "true",
}


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[str, str]]:
    try:
        with two_nodes() as names:
            yield names
    except NoNamespacesError as error:
        pytest.skip(str(error))


def launch(nodes: Sequence[str], arguments: Sequence[str], folder: Path) -> list[subprocess.Popen[str]]:
    """Starts torchrun on each node, with one process each."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'support'}"}
    environment.pop("GLOO_SOCKET_IFNAME", None)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1"]
    meeting = ["--master_addr", ADDRESSES[0], "--master_port", "29500"]
    return [
        start(node, [*launcher, *meeting, "--node_rank", str(rank), *arguments], environment, folder)
        for rank, node in enumerate(nodes)
    ]


def outputs(processes: Sequence[subprocess.Popen[str]]) -> list[str]:
    try:
        return [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)


def test_the_contract_of_clusters_holds_between_two_machines(nodes, tmp_path):
    processes = launch(nodes, ["-m", "launched_contract"], tmp_path)
    first, second = outputs(processes)
    assert [process.returncode for process in processes] == [0, 0], f"{first}\n{second}"
    assert "passed" in first


@pytest.mark.parametrize("strategy", ["torch_train", "fsdp2_train"])
def test_a_run_on_two_machines_makes_the_steps_of_two_processes_of_one(strategy, nodes, tmp_path):
    model = make_model("tiny", tmp_path / "model", [TEXT], seed=0)
    keys = [f"{key}={value}" for key, value in {**KEYS, "pretrain": model.folder}.items()]
    keys.append(f"actor_train.strategy_args.strategy_name={strategy}")
    train = ["-m", "turnwise.cli.main", "train", str(CONFIG), "--quiet", *keys]
    processes = launch(nodes, [*train, f"output_dir={tmp_path / 'two'}"], tmp_path)
    first, second = outputs(processes)
    assert [process.returncode for process in processes] == [0, 0], f"{first}\n{second}"
    devices = "actor_train.device_mapping=[0,1]"
    command = [sys.executable, *train, devices, "num_gpus_per_node=2", f"output_dir={tmp_path / 'one'}"]
    subprocess.run(command, check=True, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"})
    two = steps_of(tmp_path / "two")
    assert len(two) == KEYS["max_steps"] and all(step["actor_train/grad_norm"] > 0 for step in two)
    one = steps_of(tmp_path / "one")
    differing = {
        name: (left.get(name), right.get(name))
        for left, right in zip(two, one, strict=True)
        for name in left.keys() | right.keys()
        if left.get(name) != right.get(name)
    }
    assert not differing


def steps_of(folder: Path) -> list[dict[str, float]]:
    [metrics] = folder.glob("*/*/metrics.jsonl")
    # Sentences of health name the run's folder.
    timed = ("time/", "system/", "weights/", "health")
    return [
        {name: value for name, value in json.loads(line).items() if not name.startswith(timed)}
        for line in metrics.read_text().splitlines()
    ]
