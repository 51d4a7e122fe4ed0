"""The contract of clusters under a launcher: the first process checks, the others serve it."""

from __future__ import annotations

import cluster_contract as contract
import torch

from turnwise.cluster.launched import LaunchedCluster, serve_launched
from turnwise.runtime.event_loop import WatchedRunner
from turnwise.runtime.rank import launched
from turnwise.runtime.stopwatch import Stopwatch
from turnwise.runtime.watchdog import Watchdog


def main() -> None:
    rank, size = launched()
    if rank:
        serve_launched()
        return
    with WatchedRunner(Watchdog()) as runner:
        placement = contract.placement_of("launched", size)
        cluster = LaunchedCluster(
            runner.run,
            runner.watchdog,
            Stopwatch(),
            contract.THREADS,
            torch.set_num_threads,
            placement=placement,
        )
        for check in contract.CHECKS:
            check(cluster)
            print("passed", check.__name__, flush=True)
        cluster.shutdown()


if __name__ == "__main__":
    main()
