"""Token-in, token-out inference servers. Import from the modules: nothing heavy is imported here."""
