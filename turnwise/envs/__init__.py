"""Environments: gymnasium's contract over text and images. No tokens here. What they refuse is an EnvironmentFault."""
