"""The training loops, which the package `assemble` makes from a config. Begin reading at `agentic.py`."""
