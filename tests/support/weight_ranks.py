"""The workers that send weights, without a cluster."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from turnwise.transfer.sender import WeightSender


class Ranks:
    """The workers of one rank, whose calls run in a thread."""

    def __init__(self, sender: WeightSender) -> None:
        self.sender = sender
        self.calls: list[str] = []
        self._pool = ThreadPoolExecutor(1)

    def at(self, rank: int) -> Ranks:
        return self

    def call(self, method: str, *args: Any, route: str = "broadcast") -> Any:
        self.calls.append(method)
        return asyncio.wrap_future(self._pool.submit(getattr(self.sender, method), *args))
