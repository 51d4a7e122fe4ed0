"""Environments: gymnasium's contract over text and images, without tokens. Wrong arguments raise
EnvironmentFault."""
