"""A run asks Ray's autoscaler for the node that it lacks, waits for it, and trains on it. The autoscaler is
Ray's own, of the first version; its provider for tests starts raylets on this machine."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
from train_ray import TEXT, small, trained

from turnwise.cli.main import exit_status
from turnwise.models.make import make_model

HEAD_ID = "f" * 51 + "00000"
"""Ray's provider for tests knows the head by this id."""
STORE_BYTES = 2**28
RAY = (sys.executable, "-m", "ray.scripts.scripts")
"""Ray's own command, of this environment."""


def kind_of(num_cpus: int, num_nodes: int) -> dict[str, Any]:
    resources = {"CPU": num_cpus, "object_store_memory": STORE_BYTES}
    return {"resources": resources, "node_config": {}, "min_workers": 0, "max_workers": num_nodes}


def settings() -> dict[str, Any]:
    """What `ray up` would read: a head of one slot, and up to two nodes of two."""
    return {
        "cluster_name": "growing",
        "max_workers": 2,
        "provider": {"type": "fake_multinode", "head_node_id": HEAD_ID, "disable_node_updaters": True},
        "available_node_types": {"ray.head.default": kind_of(1, 0), "worker": kind_of(2, 2)},
        "head_node_type": "ray.head.default",
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 5,
        "auth": {"ssh_user": "nobody"},
        "docker": {},
        "file_mounts": {},
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
        "rsync_exclude": [],
        "rsync_filter": [],
        "initialization_commands": [],
        "setup_commands": [],
        "head_setup_commands": [],
        "worker_setup_commands": [],
        "head_start_ray_commands": [],
        "worker_start_ray_commands": [],
    }


def start_head(scratch: str) -> None:
    config = Path(scratch) / "cluster.yaml"
    config.write_text(json.dumps(settings()))
    words = [*RAY, "start", "--head", f"--autoscaling-config={config}", "--num-cpus=1"]
    words += [f"--object-store-memory={STORE_BYTES}", "--include-dashboard=false"]
    own = {"AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1"}
    subprocess.run(words, check=True, env=os.environ | own, stdout=subprocess.DEVNULL)


def stop_head() -> None:
    subprocess.run([*RAY, "stop", "--force"], check=False, capture_output=True)


def num_nodes() -> int:
    ray.init("auto", logging_level=logging.ERROR)
    try:
        return sum(node["Alive"] for node in ray.nodes())
    finally:
        ray.shutdown()


def train_on_new_node(model: str, scratch: str) -> None:
    keys: dict[str, object] = {
        **small(scratch, model),
        "max_steps": 2,
        "cluster.name": "ray",
        "cluster.address": "auto",
        "actor_train.device_mapping": "[0]",
        "actor_infer.device_mapping": "[1]",
        "num_gpus_per_node": "null",
    }
    start_head(scratch)
    try:
        assert num_nodes() == 1
        run = trained(scratch, "run", keys)
        assert len((run / "metrics.jsonl").read_text().splitlines()) == 2
        assert num_nodes() == 2
    finally:
        stop_head()


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        made = make_model("tiny", Path(scratch) / "model", [TEXT], seed=0)
        train_on_new_node(str(made.folder), scratch)
    print("ray: its autoscaler added the node that a run lacked")


if __name__ == "__main__":
    sys.exit(exit_status(main))
