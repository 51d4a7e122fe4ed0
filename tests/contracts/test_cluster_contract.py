from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import cluster_contract as contract
import forked
import pytest
import torch

from turnwise.cluster.fork_server import drop_processes, prepare_processes
from turnwise.cluster.local import LocalCluster
from turnwise.cluster.process_cluster import ProcessCluster
from turnwise.protocols import Cluster
from turnwise.runtime.event_loop import WatchedRunner
from turnwise.runtime.stopwatch import Stopwatch
from turnwise.runtime.watchdog import Watchdog

SUPPORT = Path(contract.__file__).parent
TIMEOUT_S = 120


@pytest.fixture(scope="module")
def fork_server() -> Iterator[None]:
    """Most of what runs import isn't needed here."""
    drop_processes()
    prepare_processes(["pytest", "cluster_contract", "turnwise.cluster.child"])
    yield
    drop_processes()


@pytest.fixture(scope="module", params=["local", "one process", "four processes"])
def cluster(request: pytest.FixtureRequest, fork_server: None) -> Iterator[Cluster]:
    if request.param == "local":
        yield LocalCluster()
        return
    num_threads = torch.get_num_threads()
    with WatchedRunner(Watchdog(grace_s=5.0)) as runner:
        placement = contract.placement_of("process", 4 if request.param == "four processes" else 1)
        made = ProcessCluster(
            runner.run,
            runner.watchdog,
            Stopwatch(),
            contract.THREADS,
            torch.set_num_threads,
            placement=placement,
        )
        yield made
        made.shutdown()
    torch.set_num_threads(num_threads)


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_contract(check: Callable[[Cluster], None], cluster: Cluster) -> None:
    check(cluster)


def test_contract_under_a_launcher() -> None:
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "cwd": SUPPORT}
    processes = forked.launch([], num_processes=4, module="launched_contract", **options)
    outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, outputs
    for check in contract.CHECKS:
        assert f"passed {check.__name__}" in outputs[0]
