"""Training from Python: what the commands do, with objects instead of texts as arguments."""
