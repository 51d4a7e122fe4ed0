"""The mathematics: pure functions on tensors and nested data, and one small class per algorithm. No I/O, no config."""
