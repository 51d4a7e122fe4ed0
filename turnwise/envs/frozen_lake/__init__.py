"""FrozenLake as text, with generated maps."""
