"""Plays groups of trajectories from tasks: admission, seeds, retries, the journal. Knows protocols, not agents or engines. What
it refuses is a TurnwiseError; its message says when it is raised."""
