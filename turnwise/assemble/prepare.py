"""Says what a run lacks on this machine."""

from collections.abc import Iterator
from importlib.util import find_spec

from turnwise.config import AgenticConfig, SFTConfig, not_here
from turnwise.config.demand import ray_reason
from turnwise.config.place import place, smallest_machine
from turnwise.errors import CheckpointError, ConfigError
from turnwise.examine.files import absent_files
from turnwise.runtime.machine import Machine, find_machine
from turnwise.runtime.rank import launched
from turnwise.spec.megatron_options import NO_KERNELS, no_context


def lacking_here(config: AgenticConfig | SFTConfig) -> Iterator[str]:
    """Yields a sentence for each thing that `train` or `sft` needs and this machine lacks: what `not_here`
    checks, devices, a checkpoint to resume from, and files. Imports torch only if the config names devices, a
    cluster or a checkpoint."""
    yield from not_here(config)
    if not _fits_everywhere(config):
        machine = find_machine()
        # What the nodes of a Ray have is known when the run joins it.
        if not ray_reason(config, machine):
            yield from lacking_devices(config, machine)
            yield from lacking_kernels(config, machine)
    try:
        if config.resume_from_checkpoint is not False:
            from turnwise.lifecycle.resume import check_resume

            check_resume(config)
    except (ConfigError, CheckpointError) as error:
        yield str(error)
    for key, name in absent_files(config):
        yield f"{key}: {name}: there is no such file."


def lacking_devices(config: AgenticConfig | SFTConfig, machine: Machine) -> Iterator[str]:
    """Yields the sentence with which a run would be refused on this machine for its devices or its
    launcher."""
    try:
        place(config, machine)
    except ConfigError as error:
        yield str(error)


def lacking_kernels(config: AgenticConfig | SFTConfig, machine: Machine) -> Iterator[str]:
    """Yields a sentence for each role whose strategy needs a library's kernels on this machine's GPUs, if
    that isn't installed, or GPUs where this machine has none."""
    roles = {"": config} if isinstance(config, SFTConfig) else config.active_roles
    for name, role in roles.items():
        library = role.strategy_args.spec.gpu_library
        if machine.accelerator and library and find_spec(library) is None:
            key = f"{name}.strategy_args.strategy_name".removeprefix(".")
            yield f"{key}: {role.strategy_args.strategy_name}: {NO_KERNELS}."
        if not machine.accelerator and library and role.context_parallel_size > 1:
            option = f"{name}.strategy_args.strategy_config.context_parallel_size".removeprefix(".")
            yield f"{option}: {no_context(role.context_parallel_size)}."


def _fits_everywhere(config: AgenticConfig | SFTConfig) -> bool:
    """Whether every machine has what the placement needs: the first device, and no launcher."""
    machine = smallest_machine(config)
    return machine.num_devices == 1 and launched() == (0, 1)
