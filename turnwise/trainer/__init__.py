"""Training from Python: the commands' machinery, told objects instead of texts."""
