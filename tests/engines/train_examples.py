"""The examples and published files of an engine train as they stand but for sizes: on two and four devices,
in fp32, with embedded servers. ENGINE on the command line is `megatron` or `deepspeed`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "qwen2.5-0.5B-agentic"
PUBLISHED = ROOT / "tests" / "data" / "published_configs.yaml"
if sys.argv[1:2] == ["megatron"]:
    # Processes that the runs start run Megatron on a CPU too.
    site = ROOT / "tests" / "support" / "megatron_site"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(site), os.environ["PYTHONPATH"]])
    from turnwise.cluster.fork_server import prepare_processes

    prepare_processes(["turnwise.assemble.strategies", "turnwise.training.megatron.strategy"])

from network_nodes import ADDRESSES, NoNamespacesError, start, two_nodes  # noqa: E402
from toy_examples import on_cpus, toy_policy, toy_sizes  # noqa: E402

from turnwise.cli.main import main  # noqa: E402
from turnwise.config import load_config  # noqa: E402
from turnwise.tracking.jsonl import read_metrics  # noqa: E402

OURS = {
    "megatron": ["agent_val_frozen_lake", "agent_val_sokoban"],
    "deepspeed": ["agent_val_frozen_lake_deepspeed"],
}
THEIRS = {
    "megatron": [
        "agent_val_frozen_lake",
        "agentic_val_sokoban_dynamic_batching",
        "agent_val_frozen_lake_gigpo",
    ],
    "deepspeed": [],
}
"""Published files, which name Megatron alone."""
PARTS = {"dp": [], "tp2": ["tensor_model_parallel_size=2"], "pp2": ["pipeline_model_parallel_size=2"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_policy(tmp_path_factory.mktemp("models") / "toy")


def train(path: Path, model: Path, folder: Path, num_devices: int, changes: list[str]) -> None:
    """Trains for two steps. Sampler and trainer agree after each update, and every update was made."""
    config, _ = load_config(path, [])
    sizes = toy_sizes(config, model, folder / "runs", num_devices)
    changes = [*sizes, *on_cpus(num_devices), *changes]
    os.chdir(folder)
    assert main(["config", str(path), *changes]) == 0
    assert main(["train", str(path), *changes, "--quiet"]) == 0
    [metrics] = folder.glob("**/metrics.jsonl")
    steps = read_metrics(metrics)
    assert len(steps) == 2
    for step in steps:
        assert step["parity/logprob_diff_max"] <= 1e-4
        assert step["actor/skipped_steps"] == 0 and step["actor_train/grad_norm"] > 0


def of_engine(names: dict[str, list[str]]) -> list[str]:
    return names.get(ENGINE, [])


ENGINE = sys.argv[1] if len(sys.argv) > 1 else ""


@pytest.mark.parametrize("num_devices", [2, 4])
@pytest.mark.parametrize("name", of_engine(OURS))
def test_an_example_trains_on_fewer_devices(name: str, num_devices: int, model: Path, tmp_path: Path) -> None:
    train(EXAMPLES / f"{name}.yaml", model, tmp_path, num_devices, [])


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("name", of_engine(THEIRS))
def test_a_published_file_trains(name: str, parts: str, model: Path, tmp_path: Path) -> None:
    files: dict[str, Any] = yaml.safe_load(PUBLISHED.read_text(encoding="utf-8"))
    values = files[f"qwen2.5-0.5B-agentic/{name}"]
    path = tmp_path / "published.yaml"
    path.write_text(json.dumps(values).replace("${", "\\\\${"), encoding="utf-8")
    roles = ["actor_train"]
    if values["reference"]["strategy_args"]["strategy_name"] == "megatron_infer":
        roles.append("reference")
    changes = [f"{role}.strategy_args.strategy_config.{size}" for role in roles for size in PARTS[parts]]
    train(path, model, tmp_path, 2, changes)


def test_two_machines_train_what_two_processes_train(model: Path, tmp_path: Path) -> None:
    """torchrun with a process on each of two machines, which are two network namespaces here."""
    path = EXAMPLES / f"{of_engine(OURS)[0]}.yaml"
    config, _ = load_config(path, [])
    shared = [*toy_sizes(config, model, tmp_path, 2), *on_cpus(2), "actor_infer.device_mapping=null"]
    command = ["-m", "turnwise.cli.main", "train", str(path), "--quiet", *shared]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("GLOO_SOCKET_IFNAME", None)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1"]
    launcher += ["--master_addr", ADDRESSES[0], "--master_port", "29500"]
    try:
        with two_nodes() as nodes:
            processes = []
            for rank, node in enumerate(nodes):
                launched = [*launcher, "--node_rank", str(rank), *command, f"output_dir={tmp_path / 'two'}"]
                processes.append(start(node, launched, environment, tmp_path))
            outputs = [process.communicate(timeout=900)[0] for process in processes]
    except NoNamespacesError as error:
        pytest.skip(str(error))
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    one = [sys.executable, *command, f"output_dir={tmp_path / 'one'}"]
    subprocess.run(one, check=True, cwd=tmp_path, env=environment)
    norms = []
    for name in ("one", "two"):
        [metrics] = (tmp_path / name).glob("**/metrics.jsonl")
        norms.append([step["actor_train/grad_norm"] for step in read_metrics(metrics)])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5) and min(norms[0]) > 0


if __name__ == "__main__":
    run = [__file__, "--noconftest", *sys.argv[2:]]
    status = pytest.main([*run, "-q", "-p", "no:cacheprovider", "-W", "ignore"])
    print(f"{ENGINE}: {Path(__file__).name} ended with status {status}")
    raise SystemExit(status)
