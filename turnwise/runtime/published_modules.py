"""Modules of published systems that users' files import, where those aren't installed: `turnwise.published`
stands for them."""

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PACKAGES = (
    "recipe",
    "recipe.langgraph_agent",
    "verl",
    "verl.experimental",
    "verl.experimental.agent_loop",
    "verl.utils",
)
MODULES = (
    "recipe.langgraph_agent.chat_model",
    "recipe.langgraph_agent.react_agent_loop",
    "verl.experimental.agent_loop.agent_loop",
    "verl.experimental.agent_loop.single_turn_agent_loop",
    "verl.experimental.agent_loop.tool_agent_loop",
    "verl.utils.profiler",
    "verl.utils.rollout_trace",
)
_OURS = "turnwise.published"


class _PublishedModules(MetaPathFinder, Loader):
    """Finds these modules if nothing else does."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in PACKAGES and fullname not in MODULES:
            return None
        return ModuleSpec(fullname, self, is_package=fullname in PACKAGES)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        ours = importlib.import_module(_OURS)

        def attribute(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return getattr(ours, name)

        vars(module)["__getattr__"] = attribute


@contextmanager
def published_modules() -> Iterator[None]:
    """Lets imports in its body find the modules of published systems."""
    finder = _PublishedModules()
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
