"""Roles in actors of Ray, on the nodes that it knows."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from turnwise.cluster.messages import Command, Network, Parcel
from turnwise.cluster.process_cluster import RANKS, ProcessCluster
from turnwise.cluster.rank_process import CallSettings, ConnectedRanks
from turnwise.cluster.ray_actor import SharedParcel
from turnwise.cluster.ray_hosts import RayHosts
from turnwise.runtime.rank import RankContext


class RayCluster(ProcessCluster):
    """Spawns each role in the actors of its placement, one per device, which `hosts` starts. Calls `on_end`
    at its end. `process_name` names an actor in errors. For the other arguments see `ProcessCluster`."""

    def __init__(
        self,
        *args: Any,
        hosts: RayHosts,
        on_end: Callable[[], object] = bool,
        process_name: str = "the trainer's process",
        **kwargs: Any,
    ) -> None:
        self._hosts = hosts
        self._process_name = process_name
        self._on_end = on_end
        super().__init__(*args, **kwargs)

    def _start(self, settings: CallSettings, begin: Callable[[], object]) -> None:
        devices = self.placement.devices
        names = [self._name(number) for number in range(len(devices))]
        for process in self._hosts.start(RANKS, names, devices):
            self._processes.append(ConnectedRanks(process, settings))
        self._set_up({}, begin)
        if len(devices) > 1:
            self._join(self._meeting())

    def _meeting(self) -> Any:
        """Where the processes meet: at a store of the first one, at its node's address."""
        host = self._hosts.part_of(self.placement.devices[0]).node.address
        return self._processes[0].start("opening a store", Parcel(Command("open_store", (host,)))).result()

    def _network(self, number: int) -> Network:
        device = self.placement.devices[number]
        name = self._hosts.device_name(device)
        if self._hosts.is_on_one_machine:
            return Network(name, self.placement.groups)
        address = self._hosts.part_of(device).node.address
        return Network(name, self.placement.groups, address, self._hosts.settings.interface)

    def _context(self, role: str, rank: int) -> RankContext:
        context = super()._context(role, rank)
        [device, *_] = self.placement.of(role).ranks[rank]
        return replace(context, device=self._hosts.device_name(device))

    def _parcel(self, command: Command, num_receivers: int) -> Parcel:
        return SharedParcel(command) if num_receivers > 1 else Parcel(command)

    def _end(self) -> None:
        with ExitStack() as endings:
            endings.callback(self._on_end)
            endings.callback(super()._end)
