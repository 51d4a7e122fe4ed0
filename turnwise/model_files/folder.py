"""Checks a model folder for unreadable files and impossible sizes, without loading it and without torch.
`turnwise config` and every load make the same checks."""

import json
import math
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from turnwise.errors import ModelError, listed
from turnwise.model_files.adapter_settings import check_adapter_settings
from turnwise.model_files.hub import HOW_TO_NAME, cached_folder, local_path, looks_like_hub_name, model_folder
from turnwise.model_files.sizes import (
    check_longest_text,
    check_rope,
    check_sizes,
    check_stop_tokens,
    require_rows,
    text_sizes,
)

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
NO_TOKENIZER = "has no tokenizer (tokenizer.json); copy it from the model that the weights belong to"
_WEIGHTS = "model.safetensors"
NO_WEIGHTS = f"has no weights ({_WEIGHTS}); copy or fetch them into this folder, or name another one"
_INDEX = "model.safetensors.index.json"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_JSON_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "tokenizer.json",
    "special_tokens_map.json",
    "added_tokens.json",
    _INDEX,
)
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_FLOAT_TYPES = (
    "F64",
    "F32",
    "F16",
    "BF16",
    "F8_E4M3",
    "F8_E5M2",
    "F8_E8M0",
    "F8_E4M3FNUZ",
    "F8_E5M2FNUZ",
    "F4",
)
"""safetensors' names of the types of real numbers."""
_EMBEDDING = "model.embed_tokens.weight"
"""Name of the embedding in models of the Llama family, of shape vocab_size × hidden_size."""
Shapes = dict[str, tuple[int, ...]]
Stamps = frozenset[tuple[str, int, int, int, int]]


class TensorHeader(NamedTuple):
    """What a safetensors file says of a tensor."""

    shape: tuple[int, ...]
    dtype: str
    """safetensors' name, such as `BF16`."""

    @property
    def is_float(self) -> bool:
        return self.dtype in _FLOAT_TYPES


@dataclass(frozen=True, slots=True)
class Trust:
    """What a model folder may do: nothing in it runs as code unless a setting allows it."""

    remote_code: bool = False
    """Python files of the folder may run (`model_args.trust_remote_code`)."""
    pickle: bool = False
    """Weights may be unpickled if there are no safetensors (`model_args.allow_pickle`)."""

    def folder(self, name: str | Path) -> Path:
        """Calls `model_folder` with these permissions."""
        return model_folder(name, self.remote_code, self.pickle)


NOTHING = Trust()


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object of a file. Raises ModelError if the file can't be read or holds something else."""
    if file.exists() and not file.is_file():  # reading a pipe waits for ever
        raise ModelError(f"{file} is a folder, pipe or device; put the file of the model there")
    try:
        content = json.loads(file.read_bytes().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ModelError(
            f"{file} isn't UTF-8 text (byte {error.start}); save it again from the model that it belongs to"
        ) from error
    except (ValueError, RecursionError, OSError) as error:
        reason = str(error)
        if isinstance(error, RecursionError):
            reason = "its values are nested too deep"
        raise ModelError(f"{file} isn't readable JSON: {reason}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} holds a {type(content).__name__}; expected an object, {{…}}")
    return content


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has a tokenizer's file. Without one, transformers makes up a tokenizer."""
    return any((folder / name).is_file() for name in _TOKENIZERS)


def has_weights(folder: Path) -> bool:
    """Whether a folder has weights, as safetensors or pickles."""
    return any((folder / name).is_file() for name in (_WEIGHTS, _INDEX, *_PICKLES))


def base_of_adapter(path: str | Path) -> str | None:
    """The base that a LoRA adapter's folder names, possibly another adapter; None if `path` isn't an
    adapter's folder. Raises ModelError if an adapter in this chain is incomplete, a base is neither here nor
    a hub name, or the chain is a circle."""
    bases: list[str] = []
    folders: list[Path] = []
    folder = folder_here(path)
    while folder is not None and (folder / ADAPTER_CONFIG).is_file():
        if folder.resolve() in folders:
            raise ModelError(
                f"{path}: its base model leads back to {folder}; write the model that the adapter was "
                f"trained on into base_model_name_or_path of {folder / ADAPTER_CONFIG}"
            )
        folders.append(folder.resolve())
        bases.append(_named_base(folder))
        folder = folder_here(bases[-1])
    if not bases:
        return None
    return bases[0]


def _named_base(folder: Path) -> str:
    file = folder / ADAPTER_CONFIG
    base = read_object(file).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ModelError(
            f"{file} names no base_model_name_or_path; write there the model that the adapter was trained on"
        )
    if folder_here(base) is None and not looks_like_hub_name(base):
        raise ModelError(
            f"{folder}: its base model {base} isn't there, and an adapter is nothing without it; restore it, "
            f"or write where it is now into base_model_name_or_path of {file}"
        )
    if not (folder / ADAPTER_WEIGHTS).is_file():
        pickled = ""
        if (folder / "adapter_model.bin").is_file():
            pickled = " (adapter_model.bin is a pickle, which isn't read)"
        raise ModelError(f"{folder} is an incomplete adapter: it has no {ADAPTER_WEIGHTS}{pickled}")
    return base


def check_adapter(folder: Path) -> None:
    """Raises ModelError if an adapter's folder shows that the adapter can't be merged exactly into its base
    model."""
    check_adapter_settings(folder / ADAPTER_CONFIG, read_object(folder / ADAPTER_CONFIG))
    headers = file_headers(folder / ADAPTER_WEIGHTS)
    require_floats(folder, headers, headers)


def folder_here(name: str | Path) -> Path | None:
    """The folder of a path or hub name; None if it isn't on this machine."""
    path = local_path(name)
    if path.is_dir():
        return path
    return cached_folder(str(name))


def check_model(name: str, trust: Trust = NOTHING) -> None:
    """Runs `check_folder` on a model, or on an adapter's base. A model that isn't on this machine passes."""
    if not name.strip() or "\0" in name:
        raise ModelError(f"{name!r} names no model; {HOW_TO_NAME}")
    folder = folder_here(name)
    if folder is None:
        if local_path(name).is_file():
            raise ModelError(f"{name} is a file; name the folder that it is in")
        return
    base = base_of_adapter(folder)
    if base is None:
        check_folder(folder, trust)
    else:
        check_adapter(folder)
        check_model(base, trust)


def check_folder(folder: Path, trust: Trust = NOTHING) -> None:
    """Raises ModelError if the folder's file names, JSON files or weight headers show that it can't or
    mustn't be loaded. A folder that has passed is read again only if one of its files has changed."""
    key = (folder.absolute(), trust)
    stamps = _stamps(folder)
    if _passed.get(key) == stamps:
        return
    _read_folder(folder, trust)
    _passed[key] = stamps


_passed: dict[tuple[Path, Trust], Stamps] = {}
"""The files of each folder that has passed. A run asks six times, and a tokenizer.json has megabytes."""


def _stamps(folder: Path) -> Stamps:
    """Name, size and times of each file of a folder, which change when the file does."""
    stamps = set()
    for file in folder.glob("*"):
        with suppress(OSError):  # a link to nothing, or a file that has just been removed
            stat = file.stat()
            stamps.add((file.name, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
    return frozenset(stamps)


def _read_folder(folder: Path, trust: Trust) -> None:
    if not (folder / "config.json").is_file():
        hint = "the folder of a Hugging Face model"
        saved = list(folder.glob("checkpoints/checkpoint-*/config.json"))
        if saved:
            newest = sorted(saved, key=lambda file: file.stat().st_mtime)[-1]
            hint = f"one of its checkpoints, such as {newest.parent}"
        raise ModelError(f"{folder} isn't a model folder, as it has no config.json; name {hint}")
    names = [name for name in _JSON_FILES if (folder / name).is_file()]
    contents = {name: read_object(folder / name) for name in names}
    config = contents["config.json"]
    file = folder / "config.json"
    check_sizes(file, config)
    sizes = text_sizes(config)
    check_sizes(file, sizes)
    check_rope(file, sizes)
    vocab_size = sizes.get("vocab_size")
    for name in ("config.json", "generation_config.json"):
        check_stop_tokens(folder / name, contents.get(name, {}), vocab_size)
    check_longest_text(folder / "tokenizer_config.json", contents.get("tokenizer_config.json", {}))
    _check_pickles(folder, trust)
    headers = weight_headers(folder)
    if not config.get("quantization_config"):
        weights = [name for name in headers if name.endswith(".weight")]
        require_floats(folder, headers, weights)
    shapes = {name: header.shape for name, header in headers.items()}
    _check_weights(file, sizes, shapes)
    if "tokenizer.json" in contents:
        require_rows(folder, vocab_size, _num_ids(contents["tokenizer.json"]))


def require_floats(folder: Path, headers: Mapping[str, TensorHeader], names: Iterable[str]) -> None:
    """Raises ModelError if one of the tensors with these `names` doesn't hold real numbers: converted, it
    would be another tensor than the file's."""
    other_types = [f"{name} ({headers[name].dtype})" for name in names if not headers[name].is_float]
    if other_types:
        raise ModelError(
            f"{folder}: the weights hold {listed(other_types)}, and a model's tensors are real numbers (F32, "
            "BF16, F16); fetch them again, or convert them where they come from"
        )


def _check_pickles(folder: Path, trust: Trust) -> None:
    pickled = next((name for name in _PICKLES if (folder / name).is_file()), None)
    has_tensors = (folder / _WEIGHTS).is_file() or (folder / _INDEX).is_file()
    if pickled and not has_tensors and not trust.pickle:
        raise ModelError(
            f"{folder} has no {_WEIGHTS}, and {pickled} is a pickle, which can hold code; use the model "
            "with safetensors weights, or set model_args.allow_pickle: true if you trust where it comes from"
        )


def weight_shapes(folder: Path) -> Shapes:
    """The shapes of the folder's tensors by name, from the headers of its safetensors files; empty without
    such files."""
    return {name: header.shape for name, header in weight_headers(folder).items()}


def weight_headers(folder: Path) -> dict[str, TensorHeader]:
    """What the folder's safetensors files say of each tensor; empty without such files. Raises ModelError if
    a file is cut off or missing, or the index names files elsewhere."""
    if (folder / _WEIGHTS).is_file():
        return file_headers(folder / _WEIGHTS)
    if not (folder / _INDEX).is_file():
        return {}
    weight_map = read_object(folder / _INDEX).get("weight_map")
    files = weight_map.values() if isinstance(weight_map, dict) else [None]
    if not all(isinstance(name, str) for name in files):
        raise ModelError(f"{folder / _INDEX} has no weight_map of tensors and files; fetch it again")
    headers: dict[str, TensorHeader] = {}
    for name in sorted(set(files)):
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ModelError(
                f"{folder / _INDEX} names {name!r}, which lies outside the model's folder, and nothing is "
                "read from there; copy that file into the folder, or fetch the model again"
            )
        if not (folder / name).is_file():
            raise ModelError(f"{folder / name} isn't there, and {_INDEX} names it; fetch it again")
        headers |= file_headers(folder / name)
    return headers


def tensor_files(folder: Path) -> dict[str, Path]:
    """The safetensors file of each tensor of a folder that `weight_headers` can read."""
    if (folder / _WEIGHTS).is_file():
        return dict.fromkeys(weight_headers(folder), folder / _WEIGHTS)
    weight_map = read_object(folder / _INDEX).get("weight_map", {})
    return {name: folder / weight_map[name] for name in weight_headers(folder) if name in weight_map}


def file_headers(file: Path) -> dict[str, TensorHeader]:
    """What a safetensors file says of each of its tensors. Raises ModelError if it can't be read."""
    # imported here: commands without a local model don't need it
    from safetensors import SafetensorError, safe_open

    headers: dict[str, TensorHeader] = {}
    try:
        with safe_open(file, "numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # it can't be iterated
                part = tensors.get_slice(name)
                shape = tuple(part.get_shape())
                headers[name] = TensorHeader(shape, part.get_dtype())
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{file} is cut off, or isn't a safetensors file ({error}); fetch or write it again"
        ) from error
    return headers


def _check_weights(file: Path, sizes: Mapping[str, Any], shapes: Shapes) -> None:
    """Raises ModelError if the config's sizes don't fit the weights, which otherwise shows only when the
    model is built."""
    matches = map(_LAYER.search, shapes)
    num_layers = max((int(match[1]) + 1 for match in matches if match), default=math.inf)
    stated = sizes.get("num_hidden_layers")
    if isinstance(stated, int) and stated > num_layers:
        raise ModelError(
            f"{file}: num_hidden_layers is {stated}, and the weights beside it have {num_layers}; set it to "
            "that"
        )
    rows = shapes.get(_EMBEDDING, ())
    for name, size in zip(("vocab_size", "hidden_size"), rows, strict=False):
        stated = sizes.get(name)
        if isinstance(stated, int) and stated != size:
            shape = " × ".join(f"{number:,}" for number in rows)
            raise ModelError(
                f"{file}: {name} is {stated:,}, and {_EMBEDDING} beside it is {shape}; set it to {size}"
            )


def _num_ids(tokenizer: Mapping[str, Any]) -> int:
    """One more than the highest id of a tokenizer.json, 0 if its form is unknown."""
    ids: list[Any] = []
    model = tokenizer.get("model")
    if isinstance(model, dict):
        vocab = model.get("vocab")
        if isinstance(vocab, dict):
            ids += vocab.values()
        elif isinstance(vocab, list):
            ids.append(len(vocab) - 1)
    added = tokenizer.get("added_tokens")
    if isinstance(added, list):
        ids += [token.get("id") for token in added if isinstance(token, dict)]
    numbers = [number for number in ids if isinstance(number, int)]
    return max(numbers, default=-1) + 1
