"""Fakes and a contract check, for the tests of turnwise and of users' own classes."""
