"""Says what may be replaced: a folder in which everything is what turnwise writes there, a file with the same
contents, a link. Every writer of a model asks here, and every example that writes rows."""

import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path

from turnwise.errors import ConfigError, ModelError, counted
from turnwise.model_files.folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS, read_object
from turnwise.runtime.disk import replace_file

_CONFIG = "config.json"
_WEIGHTS = r"model(-\d{5}-of-\d{5})?\.safetensors"
_MODEL_FILES = re.compile(
    r"config\.json|generation_config\.json|base_fingerprint\.txt|model\.safetensors\.index\.json"
    rf"|{re.escape(ADAPTER_CONFIG)}|{re.escape(ADAPTER_WEIGHTS)}|{_WEIGHTS}"
    r"|tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json|added_tokens\.json|chat_template\.jinja"
    r"|vocab\.json|merges\.txt|vocab\.txt|tokenizer\.model|spiece\.model|sentencepiece\.bpe\.model"
)
"""Names of the files that a written model, adapter or tokenizer has."""
_STATE_FILES = ("trainer_state.pt", "trainer_state.json", "pipeline.json", "manifest.json")
"""Files of a checkpoint which a run needs to continue."""
_RUN_FILE = "run.lock"
_MADE_BY_A_RUN = ("best", "base_model", "base_critic")
"""Folders in a run's folder that its checkpoints or its next steps need."""
_NUM_NAMED = 3
_MOUNTED = "it is where a disk is mounted, and a model's folder is put into its place by renaming"


def is_model_file(name: str) -> bool:
    """Whether a file of this name belongs to a model, adapter or tokenizer that turnwise writes."""
    return _MODEL_FILES.fullmatch(name) is not None


def require_replaceable(folder: Path, option: str, needed: Iterable[str | Path] = ()) -> None:
    """Raises ConfigError, which begins with `option`, if a model mustn't be written as `folder`: something
    else than a folder is there, or a folder with anything that turnwise doesn't write into a model's folder,
    or one that a run needs. `needed` are more folders that stay, such as the model a run started from."""
    reason = why_kept(folder, needed)
    if reason:
        raise ConfigError(
            f"{option}: {folder} already exists and isn't replaced, as {reason}; name another folder, or "
            "remove it first"
        )


def require_new_folder(folder: Path, option: str) -> None:
    """Raises ConfigError if anything but an empty folder is at `folder`, or if it is the folder that the
    command runs in."""
    if not os.path.lexists(folder):
        return
    if os.path.ismount(folder):
        raise ConfigError(
            f"{option} {folder}: {_MOUNTED}; name a new folder in it, such as {folder / 'model'}"
        )
    is_empty = folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir())
    if not is_empty or folder.resolve() == Path.cwd():
        raise ConfigError(f"{option} {folder} already exists; name a new folder, or remove it first")


def why_kept(folder: Path, needed: Iterable[str | Path] = ()) -> str:
    """The reason why `require_replaceable` refuses the folder; empty if it may be replaced."""
    if not os.path.lexists(folder):
        return ""
    if folder.is_symlink():
        return f"it is a link to {os.readlink(folder)}"
    if not folder.is_dir():
        return "it is a file"
    if Path.cwd().is_relative_to(folder.resolve()):
        return "it is the folder that you are in, or holds it"
    if os.path.ismount(folder):
        return _MOUNTED
    if not any(folder.iterdir()):
        return ""
    return _needed_by_a_run(folder, needed) or _foreign_reason(folder) or _no_model(folder)


def why_files_kept(folder: Path) -> str:
    """The reason why the model's files in a folder, which may hold other things too, mustn't be replaced;
    empty if they may, or if there are none."""
    if not folder.is_dir() or not model_files(folder):
        return ""
    return _needed_by_a_run(folder, ()) or _no_model(folder)


def model_files(folder: Path) -> list[Path]:
    """The entries of a folder that have the name of a model's file."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if is_model_file(path.name))


def require_new_or_same(file: Path, text: str | bytes, option: str) -> None:
    """Raises ConfigError if `file` is there and holds anything but `text`."""
    if not os.path.lexists(file):
        return
    if not file.is_file() or file.read_bytes() != _bytes_of(text):
        raise ConfigError(
            f"{file} already exists with other contents, and isn't replaced; name another {option}, or "
            "remove it first"
        )


def write_new_or_same(file: Path, text: str | bytes, option: str) -> None:
    """Writes `text` into a new file, whole or not at all, and makes its folder. A file that holds `text`
    already stays. Raises ConfigError, which names `option` as what to change, if something else is there."""
    require_new_or_same(file, text, option)
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, _bytes_of(text))


def _bytes_of(text: str | bytes) -> bytes:
    if isinstance(text, str):
        return text.encode()
    return text


def require_new_or_link(link: Path, option: str) -> None:
    """Raises ConfigError if something else than a link is at `link`."""
    if os.path.lexists(link) and not link.is_symlink():
        raise ConfigError(
            f"{link} is there and is no link, and isn't replaced; name another {option}, or remove it first"
        )


def point_link(link: Path, target: Path, option: str) -> Path:
    """Lets `link` point to `target` by a relative path, and returns it. Raises ConfigError if `link` is
    something else."""
    require_new_or_link(link, option)
    link.unlink(missing_ok=True)
    link.symlink_to(os.path.relpath(target, link.parent))
    return link


def _needed_by_a_run(folder: Path, needed: Iterable[str | Path]) -> str:
    resolved = folder.resolve()
    for model in map(Path, needed):
        if model.is_dir() and model.resolve().is_relative_to(resolved):
            return "it is or holds a model that this run starts from"
    for name in _STATE_FILES:
        if (folder / name).exists():
            return f"it is a checkpoint, from which a run can go on ({name})"
    if resolved.name in _MADE_BY_A_RUN and (resolved.parent / _RUN_FILE).exists():
        return f"it belongs to the run {resolved.parent}"
    return ""


def foreign_entries(folder: Path, more_names: Collection[str] = ()) -> list[str]:
    """Names of the entries of a folder that aren't files of a model, nor files with one of `more_names`; []
    if it's missing."""
    if not folder.is_dir():
        return []
    allowed = {*_modules_of(folder), *more_names}
    foreign: list[str] = []
    for entry in sorted(folder.iterdir()):
        is_allowed = is_model_file(entry.name) or entry.name in allowed
        is_plain_file = entry.is_file() and not entry.is_symlink()
        if not (is_allowed and is_plain_file):
            foreign.append(entry.name)
    return foreign


def _foreign_reason(folder: Path) -> str:
    # A model's own code comes from elsewhere, and may be the only copy.
    modules = [name for name in _modules_of(folder) if (folder / name).exists()]
    foreign = sorted({*foreign_entries(folder), *modules})
    if not foreign:
        return ""
    names = ", ".join(foreign[:_NUM_NAMED])
    num_unnamed = len(foreign) - _NUM_NAMED
    if num_unnamed > 0:
        names += f" and {counted(num_unnamed, 'other')}"
    return f"it holds {names}, which isn't part of a model"


def _modules_of(folder: Path) -> set[str]:
    """The Python files that the config of a model with its own code names."""
    auto_map = _config_of(folder).get("auto_map")
    if not isinstance(auto_map, dict):
        return set()
    references = [reference for reference in auto_map.values() if isinstance(reference, str)]
    return {f"{reference.partition('.')[0]}.py" for reference in references}


def _no_model(folder: Path) -> str:
    """Why the model's files of a folder are no model: other programs have a config.json or a vocab.txt
    too."""
    names = [path.name for path in model_files(folder)]
    is_adapter = ADAPTER_CONFIG in names and ADAPTER_WEIGHTS in names
    if is_adapter:
        return ""
    if not any(re.fullmatch(_WEIGHTS, name) for name in names):
        if not names:
            return "it has no model"
        return f"it has no weights, so its {names[0]} is of something else than a model"
    config = _config_of(folder)
    has_type = isinstance(config.get("model_type"), str)
    if has_type and isinstance(config.get("architectures"), list):
        return ""
    return f"its {_CONFIG} is of something else than a model"


def _config_of(folder: Path) -> dict[str, object]:
    file = folder / _CONFIG
    if not file.is_file():
        return {}
    try:
        return read_object(file)
    except ModelError:
        return {}
