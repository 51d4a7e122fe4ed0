"""Work and checks of a run before heavy imports."""

from __future__ import annotations

import os
from collections.abc import Iterator

from turnwise.build.envs import plug_in_problems
from turnwise.config import AgenticConfig, SFTConfig
from turnwise.config.problems import Problem
from turnwise.data.demonstrations import read_rows
from turnwise.errors import DataError
from turnwise.runtime.rank import launched


def prepare_run(config: AgenticConfig | SFTConfig) -> None:
    """Begins the imports of processes that train or serve, beside those of this process, if there are to be any."""
    has_replicas = isinstance(config, AgenticConfig) and config.num_replicas > 1
    if (config.trains_apart or has_replicas) and launched() == (0, 1):
        from turnwise.cluster.fork_server import prepare_processes

        prepare_processes(["turnwise.build.roles", *(["turnwise.build.servers"] if has_replicas else [])])


def row_problems(config: SFTConfig, may_miss: bool = False) -> Iterator[Problem]:
    """The first fault of each file of demonstrations, as far as it shows without a tokenizer. Files in `may_miss` may not exist
    yet."""
    for key, names in (("train_files", config.train_files), ("val_files", config.val_files or [])):
        for index, name in enumerate(names):
            try:
                for _ in read_rows([name]) if not may_miss or os.path.exists(name) else ():
                    pass
            except DataError as error:
                yield Problem((key, index), str(error))


def problems_here(config: AgenticConfig | SFTConfig) -> Iterator[Problem]:
    """The faults, beyond the config itself, that `train` or `sft` find without a model."""
    if isinstance(config, AgenticConfig):
        yield from plug_in_problems(config, may_miss=True)
    else:
        yield from row_problems(config, may_miss=True)
