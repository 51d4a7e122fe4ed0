"""Builds the objects of a config. This is the only package that knows every concrete class."""
