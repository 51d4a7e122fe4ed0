"""Kernels in C for a CPU, compiled where they run."""
