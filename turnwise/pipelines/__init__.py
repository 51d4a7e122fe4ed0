"""The loops. `agentic.py` is the front door; `build.py` is the one place that knows every concrete class."""
