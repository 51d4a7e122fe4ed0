"""Pictures and tables of runs: from the files that they leave, and from frames that are handed in."""
