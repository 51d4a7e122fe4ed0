"""Only files `test_*.py` are collected here: the others run in the engines' own environments."""

from pathlib import Path

_FILES = Path(__file__).parent.glob("*.py")
collect_ignore = [file.name for file in _FILES if not file.name.startswith("test_")]
