"""Modules that serve only CPUs: kernels in C, compiled where they run, and prefixes that sequences share."""
