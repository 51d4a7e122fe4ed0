"""Which words of a YAML text are numbers: the same for every file that the project reads or writes.

OmegaConf, which reads configs, differs from PyYAML in two points: `1e-3` and `1e6` are numbers, and a date is
a text."""

import re
from typing import Any

import yaml

from turnwise.spec.package_tables import YAML_LOADER

FLOAT, TIMESTAMP = "tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp"
_MERGE = "tag:yaml.org,2002:merge"
_EXPONENT = re.compile(
    r"[-+]?\d+(_\d+)*[eE][-+]?\d+|[-+]?\d+(_\d+)*\.[\d_]*[eE]\d+|\.\d+(_\d+)*([eE][-+]\d+)?"
)


class _Exactly:
    """A pattern that must fit the whole word: PyYAML calls `match` of what it is given."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self.match = pattern.fullmatch


def with_words_of_configs(kind: Any) -> Any:
    """Decorates a loader or dumper class, so that it takes words as OmegaConf does."""
    resolvers: dict[str, list[tuple[str, Any]]] = {
        first: [(tag, pattern) for tag, pattern in pairs if tag != TIMESTAMP]
        for first, pairs in vars(kind)
        .get("yaml_implicit_resolvers", kind.mro()[1].yaml_implicit_resolvers)
        .items()
    }
    for first in "-+.0123456789":
        resolvers.setdefault(first, []).append((FLOAT, _Exactly(_EXPONENT)))
    kind.yaml_implicit_resolvers = resolvers
    return kind


@with_words_of_configs
class WordLoader(YAML_LOADER):
    """Loads plain values. Raises yaml.constructor.ConstructorError for a key that a mapping has twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag == _MERGE or not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                where = key.start_mark
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value} stands here twice", where
                )
            seen.add(key.value)
        return dict(super().construct_mapping(node, deep=deep))
