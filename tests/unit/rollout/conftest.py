"""The event loop that episodes of toy agents run on."""

from __future__ import annotations

import asyncio

import pytest
from toy_agents import Contexts


@pytest.fixture
def runner():
    with asyncio.Runner() as runner:
        yield runner
    assert Contexts.num_open == 0
