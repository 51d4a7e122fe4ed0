"""Reads the package's own tables: YAML files next to the modules that use them."""

from pathlib import Path
from typing import Any

import yaml

YAML_LOADER: Any = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
"""A loader of plain values. With libyaml, which PyYAML's wheels contain, it is about eight times as fast."""


def read_table(module: str, name: str) -> Any:
    """The content of the YAML file `name` in a module's folder. `module` is the module's `__file__`."""
    text = Path(module).with_name(name).read_text(encoding="utf-8")
    return yaml.load(text, Loader=YAML_LOADER)
