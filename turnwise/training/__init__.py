"""Strategies that train a model, blind to the algorithm: they are handed a loss."""
