"""What a run can begin before anything heavy is imported."""

from __future__ import annotations

from turnwise.config import AgenticConfig


def prepare_run(config: AgenticConfig) -> None:
    """Begins the imports of the process that trains in an asynchronous run, beside those of this one."""
    if config.async_generation_ratio > 0:
        from turnwise.cluster.nursery import prepare_processes

        prepare_processes(["turnwise.pipelines.build_roles"])
