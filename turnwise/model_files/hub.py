"""Turns model names of the Hugging Face hub, `ORG/NAME`, into folders on this machine, downloaded once. The
hub isn't asked if the path ORG/NAME or a folder ORG exists here. Weights, config, tokenizer and chat template
are fetched, and code if allowed."""

import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from turnwise.errors import ModelError, first_line

HOW_TO_NAME = "set `pretrain` to a Hugging Face model folder, or to a name on the hub, ORG/NAME"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_TEXT = ("*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")
_WEIGHTS = ("model*.safetensors", "adapter_model.safetensors")
_PICKLES = ("pytorch_model*.bin",)
_SUBFOLDERS = "*/*"
_SECONDS_BETWEEN_LINES = 10.0


def looks_like_hub_name(name: str) -> bool:
    """Whether a name is `ORG/NAME`, and neither this path nor its parent folder exists here.

    >>> [looks_like_hub_name(name) for name in ("Qwen/Qwen2.5-0.5B-Instruct", "runs/a/model", "./model")]
    [True, False, False]
    """
    if not _HUB_NAME.fullmatch(name):
        return False
    path = Path(name)
    return not path.exists() and not path.parent.is_dir()


def local_path(name: str | Path) -> Path:
    """The path, with the home folder for `~`. A `~user` without a home folder stays as it is."""
    return Path(os.path.expanduser(name))


def cached_folder(name: str, allow_code: bool = False, allow_pickle: bool = False) -> Path | None:
    """The cached folder of a hub name, without a download. None if it lacks weights or lacks code that's
    needed and allowed."""
    if Path(name).exists() or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(
            snapshot_download(
                name, local_files_only=True, allow_patterns=[*_TEXT, *_WEIGHTS], ignore_patterns=_SUBFOLDERS
            )
        )
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    if allow_code and _needs_code(folder / "config.json") and not any(folder.glob("*.py")):
        return None
    weights: tuple[str, ...] = _WEIGHTS
    if allow_pickle:
        weights += _PICKLES
    if any(any(folder.glob(pattern)) for pattern in weights):
        return folder
    return None


def _needs_code(config: Path) -> bool:
    """Whether a config.json names classes in Python files beside it."""
    return config.is_file() and "auto_map" in config.read_text(encoding="utf-8", errors="replace")


def model_folder(name: str | Path, allow_code: bool = False, allow_pickle: bool = False) -> Path:
    """The folder of a path or a hub name. Downloads what the hub's cache lacks, with progress on stderr; an
    interrupted download continues. `allow_code` also fetches Python files, `allow_pickle` pickled weights if
    there are no others."""
    path = local_path(name)
    text = str(name)
    if not text.strip() or "\0" in text:
        raise ModelError(f"{text!r} names no model; {HOW_TO_NAME}")
    if path.is_dir():
        return path
    cached = cached_folder(text, allow_code, allow_pickle)
    if cached is not None:
        return cached
    check_hub_name(text)
    return _download(text, allow_code, allow_pickle)


def check_hub_name(name: str) -> None:
    """Raises ModelError if a missing model can't be fetched: `name` isn't a hub name, or HF_HUB_OFFLINE is
    set. Asks no hub."""
    path = local_path(name)
    if looks_like_hub_name(name):
        from huggingface_hub import constants

        if constants.HF_HUB_OFFLINE:
            raise ModelError(f"{name} isn't on this machine, and HF_HUB_OFFLINE is set; {how_to_fetch(name)}")
        return
    if path.is_file():
        raise ModelError(f"{path} is a file; name the folder that it is in")
    parent = ""
    if _HUB_NAME.fullmatch(name):
        parent = f" (not looked up on the hub, because {path.parent}/ is a folder here)"
    raise ModelError(
        f"{path}: no such model folder{parent}; make one with `turnwise make-model --out {path}`, or "
        f"{HOW_TO_NAME}"
    )


def how_to_fetch(name: str) -> str:
    """Advice on bringing a model to a machine without network."""
    folder = name.rpartition("/")[2]
    return (
        f"on a machine with network run `hf download {name} --local-dir {folder}`, copy the folder {folder} "
        "here and set `pretrain` to its path"
    )


def _download(name: str, allow_code: bool, allow_pickle: bool) -> Path:
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    site = constants.ENDPOINT
    try:
        sizes = {
            file.rfilename: file.size or 0
            for file in HfApi().model_info(name, files_metadata=True).siblings or ()
        }
        patterns = _patterns(name, sizes, allow_code, allow_pickle)
        files = [file for file in sizes if _matches(file, patterns)]
        size = sum(sizes[file] for file in files)
        print(
            f"{name}: no folder here, so {len(files)} files ({size / 1e6:,.1f} MB) are downloaded from "
            f"{site} to {constants.HF_HUB_CACHE}",
            file=sys.stderr,
            flush=True,
        )
        folder = snapshot_download(
            name, allow_patterns=patterns, ignore_patterns=_SUBFOLDERS, tqdm_class=_progress()
        )
    except ModelError:
        raise
    except GatedRepoError as error:
        raise ModelError(
            f"{name}: its owners ask for an agreement first; accept it at {site}/{name}, then run `hf auth "
            "login` (or set HF_TOKEN) and start again"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"{name}: there is no such folder here and no such model on the hub ({site}); check the "
            "spelling, or run `hf auth login` if it is private"
        ) from error
    except Exception as error:  # boundary: anything can go wrong between two machines
        if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403):
            raise ModelError(
                f"{name}: the hub ({site}) denies you access; run `hf auth login` (or set HF_TOKEN)"
            ) from error
        reason = first_line(error) or type(error).__name__
        state = "isn't on this machine"
        next_try = "downloads it"
        if has_cached_files(name):
            state = "is incomplete on this machine"
            next_try = "continues with what is missing"
        raise ModelError(
            f"{name} {state}, and the hub ({site}) didn't give it: {reason}. With network the same command "
            f"{next_try}; without network, {how_to_fetch(name)}"
        ) from error
    return Path(folder)


def has_cached_files(name: str) -> bool:
    """Whether the hub's cache holds any file of the model."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model")
    return any(path.is_file() for path in (folder / "snapshots").rglob("*"))


def _patterns(name: str, files: dict[str, int], allow_code: bool, allow_pickle: bool) -> list[str]:
    """The patterns of the files to download. Raises ModelError if the model has only pickled weights, which
    aren't allowed."""
    patterns = [*_TEXT, *_WEIGHTS]
    if allow_code:
        patterns.append("*.py")
    if not any(_matches(file, _WEIGHTS) for file in files):
        if not allow_pickle:
            raise ModelError(
                f"{name} has no safetensors weights on the hub; use another model, or set "
                "model_args.allow_pickle: true if it has pickled ones (pytorch_model.bin) and you trust its "
                "owners"
            )
        patterns += _PICKLES
    return patterns


def _matches(file: str, patterns: Iterable[str]) -> bool:
    """Whether a file lies in the model's own folder and fits one of the patterns."""
    return "/" not in file and any(Path(file).match(pattern) for pattern in patterns)


def _progress() -> type[Any]:
    """A subclass of tqdm that shows bars on a terminal, and prints a line every few seconds if stderr isn't
    one."""
    from huggingface_hub.utils.tqdm import tqdm

    class Progress(tqdm):  # type: ignore[misc, unused-ignore]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            if not sys.stderr.isatty():
                kwargs |= {"disable": False, "mininterval": _SECONDS_BETWEEN_LINES}
            super().__init__(*args, **kwargs)

    return Progress
