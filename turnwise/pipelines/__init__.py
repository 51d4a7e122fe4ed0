"""The training loops; begin reading at `agentic.py`. The package `build` makes them from a config."""
