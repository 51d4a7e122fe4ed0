"""Builds the objects of a config: the one room that knows every concrete class. What it refuses is a TurnwiseError."""
