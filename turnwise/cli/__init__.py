"""The command line: `turnwise VERB`."""
