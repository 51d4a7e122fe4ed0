"""Makes a plain Hugging Face folder of a checkpoint's shares, one file of it at a time."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from turnwise.models.load import write_weights
from turnwise.models.shares import MAX_FILE_BYTES, Shares
from turnwise.runtime.disk import writing


def files_of(num_bytes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    """Deals tensors of these sizes to files of at most `max_bytes` each; a larger tensor is alone.

    >>> files_of({"a": 2, "b": 3, "c": 9, "d": 1}, 5)
    [['a', 'b'], ['c'], ['d']]
    """
    files: list[list[str]] = []
    size = 0
    for name, of_tensor in num_bytes.items():
        if not files or size + of_tensor > max_bytes:
            files.append([])
            size = 0
        files[-1].append(name)
        size += of_tensor
    return files


def write_plain_weights(
    shares: Shares,
    folder: Path,
    number: int = 0,
    count: int = 1,
    max_bytes: int = MAX_FILE_BYTES,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Writes the weights of shares in `dtype` as safetensors of whole tensors into an existing folder.
    `count` processes deal the files out among themselves; this is process `number`, and the first writes the
    index. Raises OSError if they can't be written."""
    sizes = {name: dtype.itemsize * math.prod(shares.shape(name)) for name in shares.weights}
    files = files_of(sizes, max_bytes)
    names = ["model.safetensors"]
    if len(files) > 1:
        names = [f"model-{index + 1:05d}-of-{len(files):05d}.safetensors" for index in range(len(files))]
    for index, (name, tensors) in enumerate(zip(names, files, strict=True)):
        if index % count != number:
            continue
        with writing(folder / name):
            save_file(
                {tensor: shares.whole(tensor, shares.shape(tensor)).to(dtype) for tensor in tensors},
                folder / name,
                metadata={"format": "pt"},
            )
    if number == 0 and len(files) > 1:
        weight_map = {tensor: name for name, tensors in zip(names, files, strict=True) for tensor in tensors}
        values = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        text = json.dumps(values, indent=2, sort_keys=True) + "\n"
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def write_settings(model: PreTrainedModel, folder: Path) -> None:
    """Writes what a Hugging Face folder has beside its weights: the configs, and a model's own code. Raises
    OSError if they can't be written."""
    write_weights(model, folder, {})
    (folder / "model.safetensors").unlink(missing_ok=True)
