"""Finds contradictions, values without effect or out of range, and what this machine lacks."""
