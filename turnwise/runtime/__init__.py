"""The event loop, clocks, deadlines, and calls of users' code."""
