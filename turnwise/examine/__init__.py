"""Reads and checks, once, what a config names: rows, tools, users, rewards, environments and the policy's
files."""
