"""Makes samples of trajectories and packed micro-batches of samples, and plans an optimiser step."""
