"""Two raylets on two machines, which are two network namespaces with a /tmp, a /dev/shm, process numbers and
a host name of their own: GRPO with a rank on each trains what two forked processes train, and the weights
reach replicas on both."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from network_nodes import ADDRESSES, NoNamespacesError, start, two_nodes
from train_ray import CONFIG, STEPS, TEXT, differences, measured, small, trained

from turnwise.cli.main import exit_status
from turnwise.models.make import make_model

PORT = 6399
START_S = 240.0
SHELL = ["unshare", "--mount", "--ipc", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
SHELL += ["bash", "-c"]
OWN_FOLDERS = 'set -e; hostname "$1"; mount -t tmpfs tmpfs /tmp; mount -t tmpfs tmpfs /dev/shm; shift; '
RAY = [sys.executable, "-m", "ray.scripts.scripts", "start", "--num-cpus", "2", "--disable-usage-stats"]
HEAD = [*RAY, "--head", "--port", str(PORT), "--include-dashboard", "false"]


def node_command(name: str, raylet: Sequence[str], command: Sequence[str]) -> list[str]:
    """Starts a raylet on a node, then runs the command there; the raylet ends with it."""
    words = '"${@:1:' + str(len(raylet)) + '}" >&2; "${@:' + str(len(raylet) + 1) + '}"'
    return [*SHELL, OWN_FOLDERS + words, "node", name, *raylet, *command]


def main() -> None:
    os.environ |= {"TURNWISE_KERNELS": "off", "RAY_AUTH_MODE": "disabled"}
    # Outside /tmp, which each node has for itself: both see the model and the run.
    with tempfile.TemporaryDirectory(dir="/var/tmp") as scratch:
        made = make_model("tiny", Path(scratch) / "model", [TEXT], seed=0)
        keys = small(scratch, str(made.folder))
        forked = trained(scratch, "process", {**keys, "cluster.name": "process"})
        nodes_keys = {
            **keys,
            "num_gpus_per_node": 1,
            "cluster.address": f"{ADDRESSES[0]}:{PORT}",
            "actor_infer.device_mapping": "[0,1]",
            "output_dir": f"{scratch}/nodes",
        }
        texts = [f"{key}={value}" for key, value in nodes_keys.items()]
        train = [sys.executable, "-m", "turnwise.cli.main", "train", str(CONFIG), "--quiet", *texts]
        try:
            with two_nodes() as nodes:
                output = run_on(nodes, train, Path(scratch))
        except NoNamespacesError as error:
            print(f"ray: two nodes were not tried: {error}")
            return
        [folder] = Path(scratch).glob("nodes/*/*/")
        assert len(measured(folder)) == STEPS, output
        log = "".join(path.read_text() for path in folder.glob("*.log"))
        assert "over gloo to" in log, log
        assert not differences(forked, folder), differences(forked, folder)
    print(f"ray: {STEPS} steps of two ranks on two machines (network namespaces), as in two forked processes")


def run_on(nodes: Sequence[str], train: Sequence[str], folder: Path) -> str:
    """The output of a run whose driver is on the first of two nodes."""
    environment = {**os.environ, "TMPDIR": "/tmp"}
    head = [*HEAD, "--node-ip-address", ADDRESSES[0]]
    worker = [*RAY, "--address", f"{ADDRESSES[0]}:{PORT}", "--node-ip-address", ADDRESSES[1]]
    waiting = ["bash", "-c", f"until [ -e {folder}/joined ]; do sleep 0.2; done; exec {' '.join(train)}"]
    driver = start(nodes[0], node_command("node-0", head, waiting), environment, folder)
    joined = ["bash", "-c", f"touch {folder}/joined; sleep 3600"]
    time.sleep(10)  # until the head listens
    other = start(nodes[1], node_command("node-1", worker, joined), environment, folder)
    try:
        output = driver.communicate(timeout=START_S + 300)[0]
    except subprocess.TimeoutExpired:
        driver.send_signal(signal.SIGKILL)
        output = driver.communicate()[0]
    finally:
        # The first process of a namespace of processes takes all others with it.
        other.kill()
    assert driver.returncode == 0, output
    return output


if __name__ == "__main__":
    sys.exit(exit_status(main))
