"""Plays an environment before training: finds faults and measures episodes, for `turnwise check-env`."""
