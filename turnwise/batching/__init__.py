"""Turns trajectories into samples, packs samples into micro-batches, and plans an optimiser step."""
