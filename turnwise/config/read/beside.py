"""Files that a config names and that lie in the config's own folder: they are found from every working
directory."""

from pathlib import Path
from typing import Any

from turnwise.model_files.hub import local_path

FILE_KEYS = (
    ("data", "train_files"),
    ("data", "val_files"),
    ("agent", "tool_config_path"),
    ("agent", "function_tool_path"),
    ("agent", "interaction_config_path"),
    ("agent", "agent_config_path"),
    ("train_files",),
    ("val_files",),
)
"""The keys that hold a file's name, or a list of names."""


def find_beside(values: dict[str, Any], folder: Path) -> list[str]:
    """Replaces the names of files that are in the config's `folder` and not in the working directory by their
    paths, in place. Returns a note for each."""
    notes: list[str] = []
    for *sections, key in FILE_KEYS:
        section: Any = values
        for name in sections:
            section = section.get(name) if isinstance(section, dict) else None
        if not isinstance(section, dict) or key not in section:
            continue
        value = section[key]
        names = value if isinstance(value, list) else [value]
        paths = [_beside(name, folder) for name in names]
        if not any(paths):
            continue
        resolved = [name if path is None else str(path) for path, name in zip(paths, names, strict=True)]
        section[key] = resolved if isinstance(value, list) else resolved[0]
        where = ", ".join(str(path) for path in paths if path)
        notes.append(
            f"{'.'.join([*sections, key])}: not in the working directory, so read beside the config: {where}"
        )
    return notes


def _beside(name: Any, folder: Path) -> Path | None:
    """The path in `folder` of a name that isn't in the working directory; None if it is there, or in
    neither."""
    if (
        not isinstance(name, str)
        or not name
        or "\0" in name
        or local_path(name).is_absolute()
        or Path(name).exists()
    ):
        return None
    path = folder / name
    return path if path.exists() else None
