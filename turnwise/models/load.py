"""Loads and saves Hugging Face model folders, with errors that a user can act on."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import is_flash_attn_2_available
from transformers.utils import logging as transformers_logging

from turnwise.errors import ModelError, nearest
from turnwise.models.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS, is_value_adapter, merge_adapter
from turnwise.models.packed_attention import PACKED_ATTENTION, supports_packing

logger = logging.getLogger(__name__)

DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_ATTENTION = {"auto": None, "sdpa": "sdpa", "eager": "eager", "fa2": "flash_attention_2"}
_MAKE_HINT = (
    "make one with `turnwise make-model`, or set `pretrain` to a Hugging Face model folder or a model fetched by `hf download`"
)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""Of which a folder with a tokenizer has one. Without any transformers makes one up."""
_LIBRARY_ERRORS = (OSError, ValueError, KeyError, TypeError, ImportError, RuntimeError, SafetensorError)
"""What transformers raises for folders that it can't use."""


def parse_dtype(name: str) -> torch.dtype:
    """The dtype that a config names.

    Raises:
        ModelError: unknown name.
    """
    if name not in DTYPES:
        raise ModelError(f"dtype {name!r} is unknown; allowed are {', '.join(DTYPES)}.{nearest(name, DTYPES)}")
    return DTYPES[name]


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    attn_implementation: str = "auto",
) -> PreTrainedModel:
    """A causal language model in evaluation mode, with weights of `dtype` on `device`; from a folder or the hub's local cache.
    The folder of a LoRA adapter gives its base model with the adapter merged, in fp32 whatever the `dtype` then is.

    `auto` trains packed sequences without padding where the architecture allows it; `sdpa` and `eager` pad; `fa2` is
    flash attention 2 and needs CUDA.

    Raises:
        ModelError: no such folder, unreadable config, no causal language model, missing weights, or an attention that
            can't run here.
    """
    base = base_of_adapter(path)
    if base is not None:
        if is_value_adapter(Path(path)):
            raise ModelError(f"{path}: is the adapter of a critic, which has a value head and writes no text; name a policy's")
        model = load_model(base, device=device, attn_implementation=attn_implementation)
        merge_adapter(model, Path(path))
        logger.info("%s holds an adapter: merged into its base model %s", path, base)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        return model
    model, missing = load_pretrained(
        AutoModelForCausalLM, path, load_config(path), dtype=dtype, device=device, attn_implementation=attn_implementation
    )
    require_weights(path, missing)
    return model


def base_of_adapter(path: str | Path) -> str | None:
    """The base model that the folder of a LoRA adapter names; None where the path is no such folder.

    Raises:
        ModelError: it names none, or one that isn't there, or there are no weights beside it.
    """
    file = Path(path) / ADAPTER_CONFIG
    if not file.is_file():
        return None
    try:
        base = json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{file}: names no base_model_name_or_path: {_first_line(error)}") from error
    if not base or not (Path(base).is_dir() or _is_cached(base)):
        raise ModelError(
            f"{path}: its base model {base} isn't there, and an adapter is nothing without it; bring it back, or write where "
            f"it is now into base_model_name_or_path of {file}"
        )
    if not (Path(path) / ADAPTER_WEIGHTS).is_file():
        raise ModelError(f"{path}: is no whole adapter, it has no {ADAPTER_WEIGHTS}")
    return str(base)


def load_pretrained(
    kind: type[PreTrainedModel] | type[AutoModelForCausalLM],
    path: str | Path,
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    attn_implementation: str = "auto",
) -> tuple[PreTrainedModel, list[str]]:
    """A model of a class of transformers, as `load_model` gives it, and the sorted names of tensors that its weights lack.

    Raises:
        ModelError: the folder doesn't fit the class, or an attention that can't run here.
    """
    implementation = _attention(attn_implementation)
    try:
        with _no_progress_bars():
            model, report = kind.from_pretrained(
                path,
                config=config,
                dtype=dtype,
                attn_implementation=implementation,
                output_loading_info=True,
                local_files_only=True,
            )
    except _LIBRARY_ERRORS as error:
        what = "causal language model" if kind is AutoModelForCausalLM else kind.__name__
        raise ModelError(f"{path}: can't be loaded as a {what}: {_first_line(error)}") from error
    if attn_implementation == "auto" and supports_packing(model):
        model.set_attn_implementation(PACKED_ATTENTION)
    return model.to(device).eval(), sorted(report["missing_keys"])


def require_weights(path: str | Path, missing: Sequence[str]) -> None:
    """Refuses a model whose folder lacks tensors.

    Raises:
        ModelError: it does.
    """
    if missing:
        raise ModelError(f"{path}: the weights lack {len(missing)} tensors of the model ({', '.join(missing[:3])}, …)")


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder; an adapter's without one is that of its base model.

    Raises:
        ModelError: no such folder, no tokenizer in it, or no chat template.
    """
    base = base_of_adapter(path)
    has_files = any((Path(path) / name).is_file() for name in _TOKENIZER_FILES)
    if base is None:
        _require_folder(path)
    elif not has_files:
        return load_tokenizer(base)
    if Path(path).is_dir() and not has_files:
        raise ModelError(f"{path}: has no tokenizer (tokenizer.json); copy it from the model that the weights belong to")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except _LIBRARY_ERRORS as error:
        raise ModelError(f"{path}: has no usable tokenizer (tokenizer.json): {_first_line(error)}") from error
    if not len(tokenizer):
        raise ModelError(f"{path}: has no tokenizer (tokenizer.json); copy it from the model that the weights belong to")
    if tokenizer.chat_template is None:
        raise ModelError(
            f"{path}: the tokenizer has no chat template; take an instruct model, "
            "or add `chat_template` to its tokenizer_config.json"
        )
    return tokenizer


def stop_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """The tokens that end a response by the model's generation config; none where it names none."""
    eos = model.generation_config.eos_token_id if model.generation_config is not None else None
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(eos)


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, folder: Path) -> None:
    """Writes a Hugging Face folder. It appears whole or not at all; an older one of the same name is replaced."""
    with written_whole(folder) as partial:
        write_weights(model, partial)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial, save_jinja_files=False)


def write_weights(model: PreTrainedModel, folder: Path) -> None:
    """Writes config and safetensors into an existing folder: tied weights once, views of fused storage as own tensors.

    Raises:
        OSError: they can't be written.
    """
    tensors = dict(model.named_parameters())
    persistent = model.state_dict().keys()
    tensors |= {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    with _no_progress_bars():
        try:
            model.save_pretrained(folder, state_dict={name: tensor.detach().cpu().clone() for name, tensor in tensors.items()})
        except SafetensorError as error:
            raise OSError(f"{folder}: {_first_line(error)}") from error


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Keeps transformers' bars out of a terminal where each step has its line."""
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()


@contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """An empty folder to write into, which takes the name `folder` when all is written, in place of what was there.

    Where writing fails, `folder` stays as it was and nothing else is left behind. What has the name is on the disk.
    """
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        _flush_to_disk(partial)
        replace_folder(partial, folder)
        _flush(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def replace_folder(partial: Path, folder: Path) -> None:
    """Renames `partial` to `folder`, removing what was there."""
    if folder.exists():
        old = folder.with_name(folder.name + ".old")
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
        partial.rename(folder)
        shutil.rmtree(old)
    else:
        partial.rename(folder)


def remove_folder(folder: Path) -> None:
    """Removes it in one step: under its own name it is whole or gone."""
    removed = folder.with_name(folder.name + ".removed")
    shutil.rmtree(removed, ignore_errors=True)
    folder.rename(removed)
    shutil.rmtree(removed)


def _flush_to_disk(folder: Path) -> None:
    """Renaming may reach the disk before the contents do; after a power cut the name would stand for empty files."""
    for path in [*folder.rglob("*"), folder]:
        _flush(path)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _attention(name: str) -> str | None:
    if name not in _ATTENTION:
        allowed = ", ".join(_ATTENTION)
        raise ModelError(f"attn_implementation {name!r} is unknown; allowed are {allowed}.{nearest(name, _ATTENTION)}")
    if name == "fa2" and not (torch.cuda.is_available() and is_flash_attn_2_available()):
        raise ModelError("attn_implementation fa2 needs a CUDA device and the flash-attn package; use auto or sdpa here")
    return _ATTENTION[name]


def load_config(path: str | Path) -> PreTrainedConfig:
    """What the config.json of a model folder says, or of an adapter's base model.

    Raises:
        ModelError: no such folder, or transformers can't use it.
    """
    base = base_of_adapter(path)
    if base is not None:
        return load_config(base)
    _require_folder(path)
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except _LIBRARY_ERRORS as error:
        raise ModelError(f"{path}: config.json can't be used: {_first_line(error)}") from error


def _require_folder(path: str | Path) -> None:
    folder = Path(path)
    if not folder.exists() and _is_cached(str(path)):
        return
    if not folder.is_dir():
        raise ModelError(f"{path}: no such model folder; {_MAKE_HINT}")
    file = folder / "config.json"
    if not file.is_file():
        raise ModelError(f"{path}: is no model folder, it has no config.json; {_MAKE_HINT}")
    try:
        json.loads(file.read_text())
    except ValueError as error:
        raise ModelError(f"{file}: is no readable JSON: {_first_line(error)}") from error


def _is_cached(name: str) -> bool:
    """Whether it names a model of the Hugging Face hub that is on this machine. Nothing is downloaded by loading."""
    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError:
        return False


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]
