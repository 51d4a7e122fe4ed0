"""Where a model lies, what can be known of its folder without loading it, and what may be replaced."""
