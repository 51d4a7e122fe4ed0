"""Roles in this process."""

from __future__ import annotations

import threading

import pytest

from turnwise.cluster.local import LocalCluster
from turnwise.errors import DeadlineError
from turnwise.runtime.watchdog import Watchdog


class Adder:
    def add(self, values, offset=0):
        return [v + offset for v in values]


@pytest.mark.parametrize("route", ["split", "broadcast", "rank0"])
def test_every_route_reaches_the_one_worker(route):
    workers = LocalCluster().spawn("actor_train", lambda _: Adder())
    assert workers.size == 1
    assert workers.call("add", [1, 2], route=route, offset=3).result() == [4, 5]


@pytest.mark.parametrize("method", ["load", "save"])
def test_no_call_takes_longer_than_the_deadline(method):
    class Stuck:
        def load(self, folder):
            threading.Event().wait()

        save = load

    with Watchdog(grace_s=10.0, poll_s=0.01) as watchdog:
        workers = LocalCluster(watchdog=watchdog, deadline_s=0.05).spawn("critic", lambda _: Stuck())
        with pytest.raises(
            DeadlineError, match=rf"waited 0.05 s for critic.{method}; raise deadlines.train_s"
        ):
            workers.call(method, "folder")
