"""Says what a run lacks on this machine, and starts the imports of its other processes early."""

from collections.abc import Iterator

from turnwise.build.placement import build_placement
from turnwise.config import AgenticConfig, SFTConfig, not_here
from turnwise.errors import CheckpointError, ConfigError
from turnwise.examine.files import absent_files
from turnwise.runtime.rank import launched


def prepare_run(config: AgenticConfig | SFTConfig) -> None:
    """Starts the fork server now if training or servers will need it. It then imports libraries while this process does."""
    has_replicas = config.num_replicas > 1
    if (config.trains_apart or has_replicas) and launched() == (0, 1):
        from turnwise.cluster.fork_server import prepare_processes

        prepare_processes(["turnwise.build.roles", *(["turnwise.build.servers"] if has_replicas else [])])


def lacking_here(config: AgenticConfig | SFTConfig) -> Iterator[str]:
    """Yields a sentence for each thing that `train` or `sft` needs and this machine lacks: what `not_here` checks, devices, a
    checkpoint to resume from, and files. Imports torch only if the config names devices, a cluster or a checkpoint."""
    yield from not_here(config)
    devices = list(config.device_mappings.values())
    if isinstance(config, AgenticConfig):
        devices.append(config.actor_infer.device_mapping)
    try:
        if any(devices) or config.cluster.name != "auto":
            build_placement(config, is_apart=config.plays_ahead)
        if config.resume_from_checkpoint is not False:
            from turnwise.pipelines.resume import check_resume

            check_resume(config)
    except (ConfigError, CheckpointError) as error:
        yield str(error)
    for key, name in absent_files(config):
        yield f"{key}: {name}: there is no such file."
