"""Draws runs: learning curves from metrics, GIFs from frames."""
