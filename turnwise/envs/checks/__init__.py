"""`turnwise check-env`: an environment is played, compared with itself and measured before anybody trains in it."""
