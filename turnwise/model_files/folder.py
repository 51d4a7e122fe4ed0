"""Checks a model folder for unreadable files and impossible sizes, without loading it and without torch.
`turnwise config` and every load make the same checks."""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from turnwise.errors import ModelError, listed
from turnwise.model_files.adapter_settings import check_adapter_settings
from turnwise.model_files.hub import HOW_TO_NAME, cached_folder, local_path, looks_like_hub_name, model_folder

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
NO_TOKENIZER = "has no tokenizer (tokenizer.json); copy it from the model that the weights belong to"
_WEIGHTS = "model.safetensors"
NO_WEIGHTS = f"has no weights ({_WEIGHTS}); copy or fetch them into this folder, or name another one"
_INDEX = "model.safetensors.index.json"
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
_SIZES = (
    "hidden_size|intermediate_size|head_dim|vocab_size|(original_)?max_position_embeddings|sliding_window"
    "|num_attention_heads|num_key_value_heads|n_head|n_embd"
)
_RANGES = (
    ("num_hidden_layers|n_layer", int, 1, 10_000, "a whole number from 1 to 10,000"),
    (_SIZES, int, 1, math.inf, "a whole number of at least 1"),
    ("max_window_layers|chunk_size_feed_forward", int, 0, math.inf, "a whole number of at least 0"),
    (".*dropout.*|.*_pdrop|.*_eps|.*_epsilon", float, 0, 1, "a number from 0 to 1"),
    ("initializer_range", float, 0, 1e3, "a number from 0 to 1,000"),
    ("rope_theta|factor|partial_rotary_factor", float, math.ulp(0), math.inf, "a number above 0"),
)
"""Rules for a config's numbers: pattern of the name, type, lowest and highest value, and wording for
messages."""
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
_ROPE_BASES = ("rope_theta", "rotary_emb_base")
"""Names of the number that every rotary position is computed from."""
_EMBEDDING = "model.embed_tokens.weight"
"""Name of the embedding in models of the Llama family, of shape vocab_size × hidden_size."""
Shapes = dict[str, tuple[int, ...]]


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
        reason = "its values are nested too deep" if isinstance(error, RecursionError) else str(error)
        raise ModelError(f"{file} isn't readable JSON: {reason}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} holds a {type(content).__name__}; expected an object, {{…}}")
    return content


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has a tokenizer's file. Without one, transformers makes up a tokenizer."""
    return any(
        (folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
    )


def has_weights(folder: Path) -> bool:
    """Whether a folder has weights, as safetensors or pickles."""
    return any((folder / name).is_file() for name in (_WEIGHTS, _INDEX, *_PICKLES))


def base_of_adapter(path: str | Path) -> str | None:
    """The base that a LoRA adapter's folder names, possibly another adapter; None if `path` isn't an
    adapter's folder. Raises ModelError if an adapter in this chain is incomplete, a base is neither here nor
    a hub name, or the chain is a circle."""
    bases: list[str] = []
    seen: list[Path] = []
    folder = folder_here(path)
    while folder is not None and (folder / ADAPTER_CONFIG).is_file():
        if folder.resolve() in seen:
            raise ModelError(
                f"{path}: its base model leads back to {folder}; write the model that the adapter was "
                f"trained on into "
                f"base_model_name_or_path of {folder / ADAPTER_CONFIG}"
            )
        seen.append(folder.resolve())
        bases.append(_named_base(folder))
        folder = folder_here(bases[-1])
    return bases[0] if bases else None


def _named_base(folder: Path) -> str:
    file = folder / ADAPTER_CONFIG
    base = read_object(file).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ModelError(
            f"{file} names no base_model_name_or_path; write there the model that the adapter was trained on"
        )
    if folder_here(base) is None and not looks_like_hub_name(base):
        raise ModelError(
            f"{folder}: its base model {base} isn't there, and an adapter is nothing without it; restore "
            f"it, or write where "
            f"it is now into base_model_name_or_path of {file}"
        )
    if not (folder / ADAPTER_WEIGHTS).is_file():
        pickled = (
            " (adapter_model.bin is a pickle, which isn't read)"
            if (folder / "adapter_model.bin").is_file()
            else ""
        )
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
    return path if path.is_dir() else cached_folder(str(name))


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
    mustn't be loaded."""
    if not (folder / "config.json").is_file():
        saved = sorted(
            folder.glob("checkpoints/checkpoint-*/config.json"), key=lambda file: file.stat().st_mtime
        )
        hint = (
            f"one of its checkpoints, such as {saved[-1].parent}"
            if saved
            else "the folder of a Hugging Face model"
        )
        raise ModelError(f"{folder} isn't a model folder, as it has no config.json; name {hint}")
    contents = {name: read_object(folder / name) for name in _JSON_FILES if (folder / name).is_file()}
    config = contents["config.json"]
    file = folder / "config.json"
    check_sizes(file, config)
    sizes = text_sizes(config)
    check_sizes(file, sizes)
    _check_rope(file, sizes)
    for name in ("config.json", "generation_config.json"):
        _check_stop_tokens(folder / name, contents.get(name, {}), sizes.get("vocab_size"))
    _check_longest_text(folder / "tokenizer_config.json", contents.get("tokenizer_config.json", {}))
    _check_pickles(folder, trust)
    headers = weight_headers(folder)
    if not config.get("quantization_config"):
        require_floats(folder, headers, (name for name in headers if name.endswith(".weight")))
    _check_weights(file, sizes, {name: header.shape for name, header in headers.items()})
    if "tokenizer.json" in contents:
        require_rows(folder, sizes.get("vocab_size"), _num_ids(contents["tokenizer.json"]))


def text_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a config.json. Those in `text_config`, a multimodal model's language part, take
    precedence."""
    text_config = config.get("text_config")
    return {**config, **(text_config if isinstance(text_config, dict) else {})}


def require_rows(folder: str | Path, num_rows: Any, num_ids: int) -> None:
    """Raises ModelError if the model's embedding has fewer rows than the tokenizer has ids."""
    if isinstance(num_rows, int) and num_rows < num_ids:
        raise ModelError(
            f"{folder}: vocab_size of config.json is {num_rows:,}, and its tokenizer has ids up to "
            f"{num_ids - 1:,}; take the "
            "tokenizer that belongs to the weights"
        )


def check_sizes(file: str | Path, config: Mapping[str, Any]) -> None:
    """Raises ModelError for numbers that no model can have. `file`, for messages, is the file or option that
    holds them."""
    for name, value in config.items():
        if name.startswith("rope_") and isinstance(value, dict):
            check_sizes(f"{file}: {name}", value)
        for names, kind, low, high, told in _RANGES:
            if not re.fullmatch(names, name) or isinstance(value, list | None):
                continue
            # `true` isn't 1, and NaN is within no bounds.
            if isinstance(value, bool) or not isinstance(value, (kind, int)) or not low <= value <= high:
                raise ModelError(f"{file}: {name} is {value!r}; it must be {told}")
    heads, shared = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(shared, int) and heads % shared:
        raise ModelError(
            f"{file}: {heads} attention heads can't share {shared} key-value heads; num_attention_heads "
            f"must be a multiple of "
            "num_key_value_heads"
        )


def _check_rope(file: str | Path, config: Mapping[str, Any]) -> None:
    """Raises ModelError if the numbers of rotary positions are given in another form than an object, or
    without the base that they are computed from: transformers would take the architecture's default without a
    word."""
    rope = config.get("rope_parameters")
    if rope is None:
        return
    bases = "rope_theta, the number that every position is computed from"
    if not isinstance(rope, dict):
        raise ModelError(f"{file}: rope_parameters is {rope!r}; it must be an object with {bases}")
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    if not any(name in part for part in (config, *parts) for name in _ROPE_BASES):
        raise ModelError(
            f"{file}: rope_parameters is {rope!r} and names no {bases}; copy it from the model of the weights"
        )


def _check_stop_tokens(file: Path, content: Mapping[str, Any], vocab_size: Any) -> None:
    """Raises ModelError if a token that ends a response isn't an id of the vocabulary, and so could never be
    sampled."""
    eos = content.get("eos_token_id")
    if eos is None:
        return
    num_ids = vocab_size if isinstance(vocab_size, int) else math.inf
    for token in eos if isinstance(eos, list) else [eos]:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < num_ids:
            raise ModelError(
                f"{file}: eos_token_id is {eos!r}; it must be an id of the vocabulary (vocab_size "
                f"{vocab_size}), or a list of "
                "such ids: no response could ever end with another"
            )


def _check_longest_text(file: Path, content: Mapping[str, Any]) -> None:
    longest = content.get("model_max_length")
    if longest is None:
        return
    if isinstance(longest, bool) or not isinstance(longest, int | float) or not longest > 0:
        raise ModelError(
            f"{file}: model_max_length is {longest!r}; it must be a number of tokens above 0, or left out"
        )


def require_floats(folder: Path, headers: Mapping[str, TensorHeader], names: Iterable[str]) -> None:
    """Raises ModelError if one of the tensors with these `names` doesn't hold real numbers: converted, it
    would be another tensor than the file's."""
    others = [f"{name} ({headers[name].dtype})" for name in names if not headers[name].is_float]
    if others:
        raise ModelError(
            f"{folder}: the weights hold {listed(others)}, and a model's tensors are real numbers (F32, "
            f"BF16, F16); fetch them "
            "again, or convert them where they come from"
        )


def _check_pickles(folder: Path, trust: Trust) -> None:
    pickled = next((name for name in _PICKLES if (folder / name).is_file()), None)
    has_tensors = (folder / _WEIGHTS).is_file() or (folder / _INDEX).is_file()
    if pickled and not has_tensors and not trust.pickle:
        raise ModelError(
            f"{folder} has no {_WEIGHTS}, and {pickled} is a pickle, which can hold code; take the model "
            f"with safetensors "
            "weights, or set model_args.allow_pickle: true if you trust where it comes from"
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
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelError(f"{folder / _INDEX} has no weight_map of tensors and files; fetch it again")
    headers: dict[str, TensorHeader] = {}
    for name in sorted(set(weight_map.values())):
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ModelError(
                f"{folder / _INDEX} names {name!r}, which lies outside the model's folder, and nothing is "
                f"read from there; "
                "copy that file into the folder, or fetch the model again"
            )
        if not (folder / name).is_file():
            raise ModelError(f"{folder / name} isn't there, and {_INDEX} names it; fetch it again")
        headers |= file_headers(folder / name)
    return headers


def file_headers(file: Path) -> dict[str, TensorHeader]:
    """What a safetensors file says of each of its tensors. Raises ModelError if it can't be read."""
    from safetensors import (
        SafetensorError,
        safe_open,
    )  # imported here: commands without a local model don't need it

    headers: dict[str, TensorHeader] = {}
    try:
        with safe_open(file, "numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # it can't be iterated
                part = tensors.get_slice(name)
                headers[name] = TensorHeader(tuple(part.get_shape()), part.get_dtype())
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{file} is cut off, or isn't a safetensors file ({error}); fetch or write it again"
        ) from error
    return headers


def _check_weights(file: Path, sizes: Mapping[str, Any], shapes: Shapes) -> None:
    """Raises ModelError if the config's sizes don't fit the weights, which otherwise shows only when the
    model is built."""
    layers = {int(found[1]) for name in shapes if (found := _LAYER.search(name))}
    asked = sizes.get("num_hidden_layers")
    if layers and isinstance(asked, int) and asked > max(layers) + 1:
        raise ModelError(
            f"{file}: num_hidden_layers is {asked}, and the weights beside it have {max(layers) + 1}; set "
            f"it to that"
        )
    rows = shapes.get(_EMBEDDING, ())
    for name, size in zip(("vocab_size", "hidden_size"), rows, strict=False):
        if isinstance(asked := sizes.get(name), int) and asked != size:
            shape = " × ".join(f"{number:,}" for number in rows)
            raise ModelError(
                f"{file}: {name} is {asked:,}, and {_EMBEDDING} beside it is {shape}; set it to {size}"
            )


def _num_ids(tokenizer: Mapping[str, Any]) -> int:
    """One more than the highest id of a tokenizer.json, 0 if its form is unknown."""
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    ids = (
        [*vocab.values()] if isinstance(vocab, dict) else [len(vocab) - 1] if isinstance(vocab, list) else []
    )
    ids += [token.get("id") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    return max((number for number in ids if isinstance(number, int)), default=-1) + 1
