"""`turnwise check-env`: plays an environment before training, checks that episodes can be replayed, and measures it."""
