"""The life of a run: its folder, checkpoints, resuming, and how it ends."""
