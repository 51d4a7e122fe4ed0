"""The loops. `agentic.py` is the front door; the room `build` makes them from a config. What they refuse is a TurnwiseError."""
