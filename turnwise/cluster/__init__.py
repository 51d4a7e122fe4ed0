"""Where the workers of a role live."""
