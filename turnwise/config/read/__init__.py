"""Reads YAML files and overrides into a validated config."""
