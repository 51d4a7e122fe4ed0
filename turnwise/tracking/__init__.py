"""Reduces metrics once and hands them to trackers."""
