"""The files that a config names, and which of them aren't here."""

import os
from collections.abc import Iterator

from turnwise.config import AgenticConfig, SFTConfig


def absent_files(config: AgenticConfig | SFTConfig) -> Iterator[tuple[str, str]]:
    """Yields `(setting, name)` of each file that doesn't exist."""
    for key, names in named_files(config).items():
        may_be_elsewhere = key.endswith("_files")
        for name in names:
            if may_be_elsewhere and is_elsewhere(name):
                continue
            if not is_here(name):
                yield key, name


def is_here(name: str) -> bool:
    """Whether a file exists."""
    return os.path.exists(os.path.expanduser(name))


def is_elsewhere(name: str) -> bool:
    """Whether rows of this name may come from the hub or from Python."""
    return ":" in name or not os.path.splitext(name)[1]


def named_files(config: AgenticConfig | SFTConfig) -> dict[str, list[str]]:
    """The names of files or other sources, by the setting that names them."""
    if isinstance(config, SFTConfig):
        return {"train_files": config.train_files, "val_files": config.val_files or []}
    files: dict[str, list[str]] = {}
    if config.train_env_manager.has_rows:
        files["data.train_files"] = config.data.train_files or []
    if config.val_env_manager.has_rows and config.uses_validation:
        files["data.val_files"] = config.data.val_files or []
    for key in ("tool_config_path", "function_tool_path", "interaction_config_path", "agent_config_path"):
        path = vars(config.agent)[key]
        if path:
            files[f"agent.{key}"] = [path]
    return files
