"""The training loops, which the package `build` makes from a config. Begin reading at `agentic.py`."""
