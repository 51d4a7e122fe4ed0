"""Clusters, which start the workers of each role, in this process or in others, and call the workers'
methods."""
