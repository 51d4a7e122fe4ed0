"""Clusters: the processes of a role's workers."""
