"""turnwise: reinforcement learning of language-model agents, turn by turn."""

__version__ = "0.1.0"
