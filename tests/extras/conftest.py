"""All tests of this folder take long: `make test-extras` runs them. Only files `test_*.py` are collected: the
others run in environments of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
collect_ignore = [file.name for file in FOLDER.glob("*.py") if not file.name.startswith("test_")]


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(FOLDER):
            item.add_marker(pytest.mark.extra)
