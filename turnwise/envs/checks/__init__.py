"""`turnwise check-env`: plays an environment, compares it with itself and measures it before anybody trains in it."""
