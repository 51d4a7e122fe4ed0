"""Agent loops: they play episodes over a Conversation."""
