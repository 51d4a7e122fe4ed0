"""Reads and checks rows of files and data sets, and scores the answers to them by reward functions."""
