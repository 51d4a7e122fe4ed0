"""Megatron expects CUDA whatever the device: here is all that lets it run on a CPU.

`install` makes a process ready for a later import of Megatron. The folder `megatron_site` beside this file
does so in every process that has it, and the folder of this file, on its PYTHONPATH: ranks of a launcher and
actors too."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import cache, partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

FACTORIES = ("empty", "zeros", "ones", "arange", "tensor", "full")
PACKAGE = "megatron.core"
_replaced: list[str] = []


def on_a_cpu() -> None:
    """Replaces the calls to CUDA, also if Megatron is imported already."""
    _replace_methods()
    for name, module in list(sys.modules.items()):
        if _is_megatrons(name):
            _replace_in(module)
    install()


def install() -> None:
    """Replaces them when Megatron is imported."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Is asked first whenever a module is about to be imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not _is_megatrons(name):
            return None
        _replace_methods()
        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_replace(module: ModuleType) -> None:
            execute(module)
            _replace_in(module)

        spec.loader.exec_module = execute_and_replace  # type: ignore[method-assign]
        return spec


def _is_megatrons(name: str) -> bool:
    return name == PACKAGE or name.startswith(f"{PACKAGE}.")


def _replace_methods() -> None:
    """Replaces what is Megatron's to call alone."""
    if _replaced:
        return
    _replaced.append("methods")
    import torch

    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *_: None
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    torch.nn.Module.cuda = lambda module, *_, **__: module
    torch.Tensor.type = _type_on_cuda(torch.Tensor.type)


def _replace_in(module: Any) -> None:
    """Gives a module of Megatron's its own torch, whose factories make tensors on the CPU: transformers needs
    the real ones."""
    import torch

    if getattr(module, "torch", None) is torch:
        module.torch = _cpu_torch()
    if module.__name__ == f"{PACKAGE}.tensor_parallel.random":
        # Without dropout nothing is drawn.
        module.CudaRNGStatesTracker.fork = lambda *_: nullcontext()
        module._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
        module._set_cuda_rng_state = lambda *_, **__: None


class _Torch(ModuleType):
    def __getattr__(self, name: str) -> Any:
        import torch

        return getattr(torch, name)


@cache
def _cpu_torch() -> ModuleType:
    import torch

    stand_in = _Torch("torch")
    for name in FACTORIES:
        setattr(stand_in, name, partial(_on_cpu, getattr(torch, name)))
    return stand_in


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
