"""Only files `test_*.py` are collected here: the others run in the engines' own environments."""

from pathlib import Path

collect_ignore = [file.name for file in Path(__file__).parent.glob("*.py") if not file.name.startswith("test_")]
