"""Rows of files, checked as they are read."""
