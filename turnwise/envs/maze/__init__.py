"""Mazes as text: walls, a goal and a limit of time."""
