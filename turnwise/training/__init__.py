"""Strategies that train a model. They don't know the algorithm; they are given a loss."""
