"""Metrics reduced once, and where they go."""
