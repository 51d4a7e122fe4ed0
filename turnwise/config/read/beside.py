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
            section = section.get(name, {})
            if not isinstance(section, dict):
                section = {}
        value = section.get(key)
        names = value if isinstance(value, list) else [value]
        paths = [_beside(name, folder) for name in names]
        read = [str(path) for path in paths if path]
        if not read:
            continue
        if isinstance(value, list):
            section[key] = [str(path) if path else name for path, name in zip(paths, names, strict=True)]
        else:
            section[key] = read[0]
        dotted = ".".join([*sections, key])
        notes.append(f"{dotted}: not in the working directory, so read beside the config: {', '.join(read)}")
    return notes


def _beside(name: Any, folder: Path) -> Path | None:
    """The path in `folder` of a name that isn't in the working directory; None if it is there, or in
    neither."""
    if not isinstance(name, str) or not name or "\0" in name:
        return None
    if local_path(name).is_absolute() or Path(name).exists():
        return None
    path = folder / name
    return path if path.exists() else None
