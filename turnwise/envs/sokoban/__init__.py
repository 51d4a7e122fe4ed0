"""Sokoban as text, with generated rooms."""
