"""Agents over HTTP: the protocols that clients speak, and the server that answers them from an episode's
tree (docs/design/gateway.md)."""
