"""Tools that a model may call, and simulated users, with limits, deadlines, metrics and state."""
