"""All code that serves only CPUs: kernels in C, compiled where they run, and prefixes that sequences share."""
