"""Checks a run before torch is imported."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from turnwise.build.demonstration_rows import check_source
from turnwise.build.envs import plug_in_problems
from turnwise.chat.folder_tokenizer import FolderTokenizer
from turnwise.chat.template import ChatTemplate
from turnwise.chat.trial import tried
from turnwise.config import AgenticConfig, SFTConfig, not_here
from turnwise.config.place import place, smallest_machine
from turnwise.config.problems import Problem
from turnwise.errors import ChatTemplateError, CheckpointError, ConfigError, DataError, NotAvailableError, TurnwiseError
from turnwise.model_folder import base_of_adapter, folder_here, has_tokenizer
from turnwise.runtime.machine import Machine, find_machine
from turnwise.runtime.rank import launched


def row_problems(config: SFTConfig, may_miss: bool = False) -> Iterator[Problem]:
    """Yields, per file of demonstrations, the first fault that shows without a tokenizer. `may_miss` allows missing files."""
    for key, names in _files(config).items():
        for index, name in enumerate(names):
            if may_miss and not _is_elsewhere(name) and not os.path.exists(os.path.expanduser(name)):
                continue
            try:
                check_source(config, key, name)
            except (DataError, NotAvailableError) as error:
                yield Problem((key, index), str(error))


def problems_here(config: AgenticConfig | SFTConfig, may_miss: bool = True) -> Iterator[Problem]:
    """Yields the faults that `train` or `sft` would find before loading a model: those of plug-ins or demonstrations or, if
    there are none, of the chat template. With `may_miss`, files that don't exist aren't faults."""
    is_right = True
    for problem in row_problems(config, may_miss) if isinstance(config, SFTConfig) else plug_in_problems(config, may_miss):
        is_right = False
        yield problem
    if is_right:
        yield from _template_problems(config)


def _template_problems(config: AgenticConfig | SFTConfig) -> Iterator[Problem]:
    """Yields the first fault of the chat template with the config's variables, rows and tools, if their files are here."""
    arguments = config.model_args if isinstance(config, SFTConfig) else config.actor_train.model_args
    folder = folder_here(arguments.model_name_or_path)
    if folder is None:
        return
    try:
        if isinstance(config, SFTConfig) or not config.train_env_manager.has_rows:
            _try_template(config, folder)
        elif not any(_absent(config)):
            from turnwise.build.rows import check_template  # imports torch

            check_template(config)
    except TurnwiseError as error:
        key, _, message = str(error).partition(": ")
        is_named = key.partition(".")[0] in type(config).model_fields
        yield Problem.at(key, message) if is_named else Problem(("pretrain",), str(error))


def _try_template(config: AgenticConfig | SFTConfig, folder: Path) -> None:
    """Renders the template with messages like those of demonstrations or environments. Raises ChatTemplateError for a fault."""
    if not has_tokenizer(folder):
        base = base_of_adapter(folder)
        if base is not None and (base_folder := folder_here(base)) is not None:
            _try_template(config, base_folder)
        return
    template = tried(ChatTemplate(cast(Any, FolderTokenizer(folder)), template_kwargs=config.template_kwargs))
    template.opens_thinking  # noqa: B018  # renders one turn after another
    if isinstance(config, SFTConfig):
        return
    for tag in config.train_env_manager.env_tags:
        env = config.custom_envs[tag]
        if env.agent_name == "env_agent" and env.agent_system_template:
            said = [{"role": "system", "content": env.agent_system_template}, {"role": "user", "content": "a"}]
            try:
                template.renderer.shown((), said)
            except ChatTemplateError as error:
                raise ChatTemplateError(f"custom_envs.{tag}.agent_system_template: {error}") from error


def lacking_here(config: AgenticConfig | SFTConfig) -> Iterator[str]:
    """Yields a sentence for each thing that `train` or `sft` needs and this machine lacks: what `not_here` checks, devices, a
    checkpoint to resume from, and files. Imports torch only if the config names devices, a cluster or a checkpoint."""
    yield from not_here(config)
    if not _fits_everywhere(config):
        yield from lacking_devices(config, find_machine())
    try:
        if config.resume_from_checkpoint is not False:
            from turnwise.pipelines.resume import check_resume

            check_resume(config)
    except (ConfigError, CheckpointError) as error:
        yield str(error)
    yield from _absent(config)


def lacking_devices(config: AgenticConfig | SFTConfig, machine: Machine) -> Iterator[str]:
    """Yields the sentence with which a run would be refused on this machine for its devices or its launcher."""
    try:
        place(config, machine)
    except ConfigError as error:
        yield str(error)


def _fits_everywhere(config: AgenticConfig | SFTConfig) -> bool:
    """Whether every machine has what the placement needs: the first device, and no launcher."""
    machine = smallest_machine(config)
    return machine.num_devices == 1 and launched() == (0, 1)


def _absent(config: AgenticConfig | SFTConfig) -> Iterator[str]:
    for key, names in _files(config).items():
        for name in names:
            is_of_rows = key.endswith("_files")
            if not (is_of_rows and _is_elsewhere(name)) and not os.path.exists(os.path.expanduser(name)):
                yield f"{key}: {name}: there is no such file."


def _is_elsewhere(name: str) -> bool:
    """Whether rows of this name may come from the hub or from Python."""
    return ":" in name or not os.path.splitext(name)[1]


def _files(config: AgenticConfig | SFTConfig) -> dict[str, list[str]]:
    if isinstance(config, SFTConfig):
        return {"train_files": config.train_files, "val_files": config.val_files or []}
    files: dict[str, list[str]] = {}
    if config.train_env_manager.has_rows:
        files["data.train_files"] = config.data.train_files or []
    if config.val_env_manager.has_rows and config.uses_validation:
        files["data.val_files"] = config.data.val_files or []
    for key in ("tool_config_path", "function_tool_path", "interaction_config_path", "agent_config_path"):
        if path := vars(config.agent)[key]:
            files[f"agent.{key}"] = [path]
    return files
