"""Agent loops: how an episode is played over a Conversation."""
