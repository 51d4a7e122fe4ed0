"""Plays groups of trajectories from tasks: admission, seeds, retries, the journal. Knows protocols, not agents or engines.
Errors that a user can fix are TurnwiseErrors."""
