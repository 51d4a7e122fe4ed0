"""From trajectories to samples, from samples to packed micro-batches, and the plan of an optimiser step."""
