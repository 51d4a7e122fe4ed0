"""Plays groups of trajectories from tasks: admission, seeds, retries, the journal. Agents and servers are
protocols here."""
