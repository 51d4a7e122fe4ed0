"""Megatron expects CUDA whatever the device: here is all that lets it run on a CPU.

`install` makes a process ready for a later import of Megatron. The folder `megatron_site` beside this file
does so in every process that has it, and the folder of this file, on its PYTHONPATH: ranks of a launcher and
actors too."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import partial, wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

FACTORIES = ("empty", "zeros", "ones", "arange", "tensor", "full")
RANDOM = "megatron.core.tensor_parallel.random"
_replaced: list[str] = []


def on_a_cpu() -> None:
    """Replaces the calls to CUDA, also if Megatron is imported already."""
    _replace_in_torch()
    if RANDOM in sys.modules:
        _replace_in_random(sys.modules[RANDOM])
    else:
        install()


def install() -> None:
    """Replaces them when Megatron is first imported."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Is asked first whenever a module is about to be imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name == "megatron.core":
            _replace_in_torch()
        if name != RANDOM:
            return None
        spec = PathFinder.find_spec(name, path)
        assert spec is not None and spec.loader is not None, f"{name} isn't there"
        execute = spec.loader.exec_module

        def execute_and_replace(module: ModuleType) -> None:
            execute(module)
            _replace_in_random(module)

        spec.loader.exec_module = execute_and_replace  # type: ignore[method-assign]
        return spec


def _replace_in_torch() -> None:
    if _replaced:
        return
    _replaced.append("torch")
    import torch

    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *_: None
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    torch.nn.Module.cuda = lambda module, *_, **__: module
    torch.Tensor.type = _type_on_cuda(torch.Tensor.type)
    for name in FACTORIES:
        make = getattr(torch, name)
        setattr(torch, name, wraps(make)(partial(_on_cpu, make)))


def _replace_in_random(module: Any) -> None:
    import torch

    # Without dropout nothing is drawn.
    module.CudaRNGStatesTracker.fork = lambda *_: nullcontext()
    module._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    module._set_cuda_rng_state = lambda *_, **__: None


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
