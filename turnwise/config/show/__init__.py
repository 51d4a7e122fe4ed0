"""Shows a config: the table of its settings, and its YAML."""
