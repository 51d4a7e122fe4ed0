"""Clocks, deadlines and calls of code that is not ours: what every room waits with."""
