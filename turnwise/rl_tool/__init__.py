"""One tool with a few verbs, for people who don't write training code: told dicts, and answering with JSON."""
