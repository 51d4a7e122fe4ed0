"""Weights from the ranks of a trainer to inference servers. docs/design/transfer.md walks one version through
it."""
