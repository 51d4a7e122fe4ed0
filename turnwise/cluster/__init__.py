"""Clusters: they start the workers of each role, in this process or in others, and call their methods."""
