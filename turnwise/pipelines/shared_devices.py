"""Lets the roles of a synchronous run take turns in using the memory of an accelerator that they share."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field

from turnwise.protocols import MemoryKind

Move = Callable[[list[MemoryKind]], Awaitable[object]]


@dataclass(slots=True)
class Resident:
    """A role, and the `kinds` of its memory that can move from devices to the host. Weights that another role
    reads can't."""

    devices: frozenset[int]
    kinds: frozenset[MemoryKind]
    offload: Move
    onload: Move
    present: set[MemoryKind] = field(default_factory=set)
    """The kinds of memory that are on the devices now."""

    def __post_init__(self) -> None:
        self.present = set(self.kinds)


class SharedDevices:
    """Knows which roles' memory is on which device. Before a role computes, the other roles on its devices
    move their memory away, and its own memory comes back. Optimiser state and KV cache are never on a device
    together."""

    def __init__(self, residents: Mapping[str, Resident]) -> None:
        self._residents = residents
        self._lock = asyncio.Lock()

    async def claim(self, role: str, kinds: Collection[MemoryKind] | None = None) -> None:
        """Brings these `kinds` of the role's memory (default: all) to its devices, and moves all other memory
        off them."""
        resident = self._residents.get(role)
        if resident is None:
            return
        claimed = resident.kinds
        if kinds is not None:
            claimed = frozenset(kinds)
        await self._share({role: claimed}, resident.devices)

    async def free_for_transfer(self) -> None:
        """Leaves only the weights of trainer and servers on their devices. Call it before a weight
        transfer."""
        weights: frozenset[MemoryKind] = frozenset({"weights"})
        devices = [self._residents[role].devices for role in ("actor_train", "actor_infer")]
        await self._share({"actor_train": weights, "actor_infer": weights}, devices[0] | devices[1])

    async def _share(self, claims: Mapping[str, frozenset[MemoryKind]], devices: frozenset[int]) -> None:
        """Moves all memory but that of the `claims` (by role) off these devices. Then brings the claimed
        memory back."""
        async with self._lock:
            for role, resident in self._residents.items():
                leaving = resident.present - claims.get(role, frozenset())
                if leaving and resident.devices & devices:
                    await resident.offload(sorted(leaving))
                    resident.present -= leaving
            for role, kinds in claims.items():
                resident = self._residents[role]
                coming = (resident.kinds & kinds) - resident.present
                if coming:
                    await resident.onload(sorted(coming))
                    resident.present |= coming
