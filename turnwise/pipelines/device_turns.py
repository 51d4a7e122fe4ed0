"""Roles that share an accelerator take turns in using its memory, if the run is synchronous."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field

from turnwise.protocols import MemoryKind

Move = Callable[[list[MemoryKind]], Awaitable[object]]


@dataclass(slots=True)
class Resident:
    """The memory that a role holds on its devices and can move away. It doesn't include weights that another role reads."""

    devices: frozenset[int]
    kinds: frozenset[MemoryKind]
    put_away: Move
    bring_back: Move
    present: set[MemoryKind] = field(default_factory=set)
    """The kinds of its memory that are on the devices now."""

    def __post_init__(self) -> None:
        self.present = set(self.kinds)


class DeviceTurns:
    """Knows whose memory is on which device. Before a role computes, the other roles on its devices move their memory away;
    then its own comes back. Optimiser state and KV are never on a device together. A role calls `take` itself, so the training
    loop knows nothing of it."""

    def __init__(self, residents: Mapping[str, Resident]) -> None:
        self._residents = residents
        self._lock = asyncio.Lock()

    async def take(self, role: str, kinds: Collection[MemoryKind] | None = None) -> None:
        """Makes room for `role`, which computes next with these kinds of its memory (default: all)."""
        own = self._residents.get(role)
        if own is not None:
            await self._share({role: own.kinds if kinds is None else frozenset(kinds)}, own.devices)

    async def transfer(self) -> None:
        """Prepares a transfer from the trainer to the servers: the weights of both are on the devices, and nothing else."""
        weights: frozenset[MemoryKind] = frozenset({"weights"})
        devices = [self._residents[role].devices for role in ("actor_train", "actor_infer")]
        await self._share({"actor_train": weights, "actor_infer": weights}, devices[0] | devices[1])

    async def _share(self, wanted: Mapping[str, frozenset[MemoryKind]], devices: frozenset[int]) -> None:
        """Leaves only the wanted memory on the devices. The other memory is moved away first."""
        async with self._lock:
            for role, resident in self._residents.items():
                leaving = resident.present - wanted.get(role, frozenset())
                if leaving and resident.devices & devices:
                    await resident.put_away(sorted(leaving))
                    resident.present -= leaving
            for role, kinds in wanted.items():
                resident = self._residents[role]
                coming = (resident.kinds & kinds) - resident.present
                if coming:
                    await resident.bring_back(sorted(coming))
                    resident.present |= coming
