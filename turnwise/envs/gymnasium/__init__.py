"""Environments of the package gymnasium as text."""
