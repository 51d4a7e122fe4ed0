"""Python imports this at its start, where the folder is on PYTHONPATH."""

from megatron_cpu import install

install()
