"""Two raylets on two machines, which are two network namespaces with a /tmp, a /dev/shm, process numbers and
a host name of their own: GRPO with a rank on each trains what two forked processes train, and the weights
reach replicas on both. So does a run whose head has no device. A model that a node doesn't see is refused."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
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
RAY = [sys.executable, "-m", "ray.scripts.scripts", "start", "--disable-usage-stats"]
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
        keys |= {"cluster.address": f"{ADDRESSES[0]}:{PORT}", "actor_infer.device_mapping": "[0,1]"}
        try:
            with two_nodes() as nodes:
                output, log = ran(nodes, scratch, "each", {**keys, "num_gpus_per_node": 1}, forked)
                assert "over gloo to" in log, log
                unseen = {**keys, "pretrain": "/tmp/model", "output_dir": f"{scratch}/refused"}
                refused = f"cp -r {made.folder} /tmp/model; {train(unseen)}; "
                output, _ = ran(nodes, scratch, "head", keys, forked, num_cores=(0, 2), first=refused)
                assert "node-1 doesn't see what this machine has at pretrain (/tmp/model)" in output, output
        except NoNamespacesError as error:
            print(f"ray: two nodes were not tried: {error}")
            return
    print(f"ray: {STEPS} steps of two ranks on two machines (network namespaces), as in two forked processes")
    print("ray: the same with both ranks on the second machine, and a head without devices")


def train(keys: Mapping[str, object]) -> str:
    """The command of a run."""
    texts = [f"{key}={value}" for key, value in keys.items()]
    return shlex.join([sys.executable, "-m", "turnwise.cli.main", "train", str(CONFIG), "--quiet", *texts])


def ran(
    nodes: Sequence[str],
    scratch: str,
    name: str,
    keys: Mapping[str, object],
    forked: Path,
    num_cores: tuple[int, int] = (2, 2),
    first: str = "",
) -> tuple[str, str]:
    """The output and the log of a run, which trains what `forked` did. The command `first` comes before
    it."""
    folder = Path(scratch) / name
    folder.mkdir()
    output = run_on(nodes, first + train({**keys, "output_dir": str(folder)}), folder, num_cores)
    [run] = folder.glob("*/*/")
    assert len(measured(run)) == STEPS, output
    assert not differences(forked, run), differences(forked, run)
    return output, "".join(path.read_text() for path in run.glob("*.log"))


def run_on(nodes: Sequence[str], commands: str, folder: Path, num_cores: tuple[int, int]) -> str:
    """The output of commands on the first of two nodes, which give Ray that many cores."""
    environment = {**os.environ, "TMPDIR": "/tmp"}
    head = [*HEAD, "--node-ip-address", ADDRESSES[0], "--num-cpus", str(num_cores[0])]
    worker = [*RAY, "--address", f"{ADDRESSES[0]}:{PORT}", "--node-ip-address", ADDRESSES[1]]
    worker += ["--num-cpus", str(num_cores[1])]
    listens = folder / "listens"
    waiting = f"touch {listens}; until [ -e {folder}/joined ]; do sleep 0.2; done; "
    driver = start(
        nodes[0], node_command("node-0", head, ["bash", "-c", waiting + commands]), environment, folder
    )
    joined = ["bash", "-c", f"touch {folder}/joined; sleep 3600"]
    while driver.poll() is None and not listens.exists():
        time.sleep(0.2)
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
