"""The event loop of a run after Ctrl-C."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from turnwise.runtime.event_loop import new_loop


def interrupt() -> None:
    raise KeyboardInterrupt


async def end_as_ctrl_c_comes() -> None:
    """Ends in the iteration before the one that Ctrl-C leaves: asyncio's own end of it is left over."""
    asyncio.get_running_loop().call_soon(interrupt)


async def save() -> str:
    await asyncio.sleep(0.01)
    return "saved"


def test_what_ctrl_c_leaves_over_stops_no_later_run_and_is_no_fault() -> None:
    loop = new_loop()
    faults: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: faults.append(context))
    try:
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(end_as_ctrl_c_comes())
        assert loop.run_until_complete(save()) == "saved"
        assert faults == []
    finally:
        loop.close()
