"""The mathematics: pure functions on tensors and nested data, and one small bundle an algorithm. No I/O, no config."""
