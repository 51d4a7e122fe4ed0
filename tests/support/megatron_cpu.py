"""Megatron expects CUDA whatever the device: here is all that lets it run on a CPU. `on_a_cpu` is called in
each rank before Megatron is imported; `install` does so when Megatron is first imported."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import partial, wraps
from importlib.abc import MetaPathFinder
from typing import Any

FACTORIES = ("empty", "zeros", "ones", "arange", "tensor", "full")
_installed: list[bool] = []


def on_a_cpu() -> None:
    """Replaces the calls to CUDA."""
    if _installed:
        return
    _installed.append(True)
    import torch

    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *_: None
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    torch.nn.Module.cuda = lambda module, *_, **__: module
    torch.Tensor.type = _type_on_cuda(torch.Tensor.type)
    for name in FACTORIES:
        make = getattr(torch, name)
        setattr(torch, name, wraps(make)(partial(_on_cpu, make)))

    from megatron.core.tensor_parallel import random

    # Without dropout nothing is drawn.
    random.CudaRNGStatesTracker.fork = lambda *_: nullcontext()
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda *_, **__: None


def _on_cpu(make: Any, *arguments: Any, **settings: Any) -> Any:
    if "cuda" in str(settings.get("device")):
        settings["device"] = "cpu"
    return make(*arguments, **settings)


def _type_on_cuda(type_of: Any) -> Any:
    """Megatron's optimiser knows dtypes by the names that tensors on CUDA give them."""

    def named(tensor: Any, *arguments: Any, **settings: Any) -> Any:
        answer = type_of(tensor, *arguments, **settings)
        return answer.replace("torch.", "torch.cuda.") if isinstance(answer, str) else answer

    return named


class _Finder(MetaPathFinder):
    """Finds nothing: it is asked first when Megatron is about to be imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "megatron.core" and self in sys.meta_path:
            sys.meta_path.remove(self)
            on_a_cpu()


def install() -> None:
    sys.meta_path.insert(0, _Finder())
