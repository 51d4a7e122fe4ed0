"""Environments behind the WebSocket of an OpenEnv server (version 0.10 of its protocol)."""
