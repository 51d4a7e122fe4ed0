"""The event loop, threads, deadlines and the stopwatch of a run, and guards around calls into users' code."""
