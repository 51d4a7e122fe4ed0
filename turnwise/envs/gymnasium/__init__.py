"""Environments of the gymnasium library as text."""
