"""Kernels in C for a CPU, compiled on the machine where they run."""
