"""Training and forward passes of models that Megatron divides among ranks."""
