"""The mathematics: pure functions on tensors and nested data, and one small class per algorithm, without I/O
or config."""
