"""Every setting of a config: what it is, how a test shows that it is in force, and the page that says so."""
