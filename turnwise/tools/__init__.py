"""Functions that a model may call, and their calls: with limits, deadlines, metrics and state."""
