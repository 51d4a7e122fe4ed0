"""One tool with a few actions, for people who don't write training code. It takes dicts and answers with JSON."""
