"""From tasks to groups of trajectories: admission, seeds, retries, the journal. Knows protocols, not agents or engines."""
