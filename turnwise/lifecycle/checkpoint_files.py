"""The files of checkpoints: their names and numbers, whether they are as they were written, and how a folder
gives up its name."""

import hashlib
import json
import shutil
from itertools import count
from pathlib import Path
from typing import Any

from turnwise.errors import CheckpointError, ModelError
from turnwise.model_files.share_index import SHARES, ShareFile, check_shares, has_shares, read_index
from turnwise.training.state import (
    SHARED_STATE_FILE,
    TRAINER_FILE,
    load_trainer_state,
    read_shared_state,
)

CONFIG_FILE = "run.yaml"
"""The resolved config of the run that saved the checkpoint."""
STATE_FILE = "pipeline.json"
MANIFEST_FILE = "manifest.json"


def all_checkpoints(path: Path) -> list[Path]:
    """The existing checkpoints in `path`, by ascending N."""
    folders = path.glob("checkpoint-*")
    numbered = (folder for folder in folders if folder.name.removeprefix("checkpoint-").isdecimal())
    return sorted(numbered, key=number_of)


def number_of(folder: Path) -> int:
    """The N of `checkpoint-N`."""
    return int(folder.name.removeprefix("checkpoint-"))


def read_state(folder: Path) -> dict[str, Any]:
    """The contents of `STATE_FILE`: `step` (steps done) and the parts' states. Raises CheckpointError if it
    can't be read."""
    try:
        state: dict[str, Any] = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        state["step"] = int(state["step"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as fault:
        raise CheckpointError(
            f"{folder} isn't a complete checkpoint: {STATE_FILE} can't be read ({fault})"
        ) from fault
    return state


def write_manifest(folder: Path) -> None:
    """Writes `MANIFEST_FILE`: size and hash of every file in the folder. Shares were hashed by the ranks that
    wrote them."""
    shares = _hashed_shares(folder)
    manifest: dict[str, dict[str, Any]] = {}
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        share = shares.get(file)
        digest = _sha256(file) if share is None else share.sha256
        manifest[str(file.relative_to(folder))] = {"bytes": file.stat().st_size, "sha256": digest}
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def _hashed_shares(folder: Path) -> dict[Path, ShareFile]:
    """The files of all shares in a checkpoint, which its roles wrote."""
    hashed: dict[Path, ShareFile] = {}
    for shares in folder.rglob(SHARES):
        if has_shares(shares.parent):
            files = read_index(shares.parent).files
            hashed |= {shares / name: contents for name, contents in files.items()}
    return hashed


def verify(folder: Path) -> None:
    """Compares every file with the size and hash in `MANIFEST_FILE`. Raises CheckpointError if a file is
    missing or differs."""
    manifest = _read_manifest(folder)
    for name in {STATE_FILE, CONFIG_FILE, *manifest}:
        file = folder / name
        try:
            if name not in manifest or not file.is_file():
                raise CheckpointError(f"{folder} isn't a complete checkpoint: {name} is missing")
            size, digest = manifest[name]
            num_bytes = file.stat().st_size
            difference = ""
            if num_bytes != size:
                difference = f"it has {num_bytes} bytes, had {size}"
            elif _sha256(file) != digest:
                difference = "its digest is another one"
            is_same = not difference
            if is_same and file.name == TRAINER_FILE:
                load_trainer_state(file, is_mapped=True)
            if is_same and file.name == SHARED_STATE_FILE:
                read_shared_state(file.parent)
                check_shares(file.parent, read_index(file.parent))
        except (OSError, ValueError) as fault:
            raise CheckpointError(f"{folder}: {name!r} can't be read ({fault})") from fault
        except ModelError as fault:
            raise CheckpointError(str(fault)) from fault
        if not is_same:
            raise CheckpointError(f"{folder} is corrupted: {name} isn't as it was written ({difference})")


def _read_manifest(folder: Path) -> dict[str, tuple[int, str]]:
    """Size and hash of each file, by its name in `MANIFEST_FILE`."""
    try:
        if not (folder / MANIFEST_FILE).is_file():  # opening a pipe would wait
            raise FileNotFoundError("there is no such file")
        manifest = json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8"))
        return {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in manifest.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as fault:
        raise CheckpointError(
            f"{folder} isn't a complete checkpoint: {MANIFEST_FILE} can't be read ({fault})"
        ) from fault


def foreign_files(folder: Path) -> list[str]:
    """The files of a checkpoint's folder that its manifest doesn't list, all of them if it can't be read."""
    try:
        listed = set(json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError):
        listed = set()
    present = (str(file.relative_to(folder)) for file in folder.rglob("*") if not file.is_dir())
    return sorted(name for name in present if name not in listed and name != MANIFEST_FILE)


def set_aside(folder: Path) -> Path:
    """Frees the name of a folder: renames the folder to the first unused `NAME.aside-N` (N = 1, 2, …).
    Returns its new path."""
    candidates = (folder.with_name(f"{folder.name}.aside-{number}") for number in count(1))
    unused = next(candidate for candidate in candidates if not candidate.exists())
    return folder.rename(unused)


def remove_leftovers(path: Path) -> None:
    """Removes what a killed process left in `path`: checkpoints partly written, replaced by a newer one, or
    partly removed."""
    for ending in ("partial", "old", "removed"):
        for leftover in path.glob(f"checkpoint-*.{ending}"):
            shutil.rmtree(leftover)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
