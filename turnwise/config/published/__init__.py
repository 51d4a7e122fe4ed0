"""Translates the keys of other systems' configs into ours."""
