"""Fakes, contract checks and toy environments for the tests of turnwise and of its extensions."""
