"""The keys of a config: their types, limits and defaults, and what follows from them."""
