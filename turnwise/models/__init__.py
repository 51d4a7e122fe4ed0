"""Models and tokenizers: making, loading and saving them, and their forward passes over packed tokens."""
