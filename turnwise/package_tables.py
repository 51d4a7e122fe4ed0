"""Reads the package's own tables: YAML files next to the modules that use them."""

from pathlib import Path
from typing import Any

import yaml

YAML_LOADER: Any = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
"""Reads plain values, some eight times faster with libyaml, which PyYAML's wheels contain."""


def read_table(module: str, name: str) -> Any:
    """The content of a YAML file in the folder of a module, given by its `__file__`."""
    return yaml.load(Path(module).with_name(name).read_text(encoding="utf-8"), Loader=YAML_LOADER)
