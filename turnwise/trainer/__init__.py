"""Training from Python: what the commands do, with objects instead of strings as arguments."""
