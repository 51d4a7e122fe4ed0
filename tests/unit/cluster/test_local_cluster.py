"""Roles in this process."""

from __future__ import annotations

import pytest

from turnwise.cluster.local import LocalCluster
from turnwise.errors import NotAvailableError


class Adder:
    def add(self, values, offset=0):
        return [v + offset for v in values]


@pytest.mark.parametrize("route", ["split", "broadcast", "rank0"])
def test_every_route_reaches_the_one_worker(route):
    workers = LocalCluster().spawn("actor_train", lambda _: Adder())
    assert workers.size == 1
    assert workers.call("add", [1, 2], route=route, offset=3).result() == [4, 5]


def test_more_devices_than_this_process_has_are_refused():
    with pytest.raises(NotAvailableError, match="device_mapping names 8 devices"):
        LocalCluster().spawn("actor_train", lambda _: Adder(), devices=list(range(8)))
