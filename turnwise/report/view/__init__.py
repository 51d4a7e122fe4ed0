"""`turnwise view`: the pages on which people read the episodes of a run, and the same as text."""
