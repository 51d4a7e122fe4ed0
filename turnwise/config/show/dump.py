"""Writes a resolved config as YAML, and compares two configs. `resume.yaml` names the differences that forbid
resuming."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from fnmatch import fnmatch
from itertools import chain
from typing import Any, NamedTuple, get_args

import yaml

from turnwise.config.checks.without_effect import UNREAD
from turnwise.config.read.yaml_words import with_words_of_configs
from turnwise.config.schema.agentic import AgenticConfig
from turnwise.config.schema.sft import SFTConfig
from turnwise.spec import Split
from turnwise.spec.package_tables import read_table

_VERBATIM = ("env_config", "strategy_config", "pg_args", "tracker_kwargs", "args")
_MAX_INLINE = 300  # maximum characters of a mapping that is written on one line


@with_words_of_configs
class _Dumper(yaml.SafeDumper):
    """Writes short flat mappings on one line, and texts of several lines as blocks."""


def _represent_mapping(dumper: yaml.SafeDumper, value: dict[str, Any]) -> yaml.Node:
    node = dumper.represent_mapping("tag:yaml.org,2002:map", value.items())
    is_flat = not any(isinstance(item, dict) or "\n" in str(item) for item in value.values())
    node.flow_style = is_flat and len(str(value)) <= _MAX_INLINE
    return node


def _represent_text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(dict, _represent_mapping)


def resolved_values(config: AgenticConfig | SFTConfig) -> dict[str, Any]:
    """The config as plain values, without unset values, and without roles and keys that this run doesn't
    use."""
    values = _without_null(config.model_dump())
    if isinstance(config, SFTConfig):
        return values
    for name in config.roles:
        if name not in config.active_roles:
            del values[name]
            continue
        for key in chain.from_iterable(UNREAD[name].values()):
            section, _, last = key.rpartition(".")
            holder = values[name]
            if section:
                holder = holder[section]
            holder.pop(last, None)
    for split in get_args(Split):
        # Written resolved: the split's own defaults would count as set when the YAML is loaded, and override
        # actor_infer's.
        values[f"{split}_env_manager"]["generating_args"] = _without_null(config.sampling(split).model_dump())
    for key in ("data", "agent"):
        if not config.is_set(key):
            del values[key]
    return values


def dump_yaml(config: AgenticConfig | SFTConfig) -> str:
    """The resolved config as YAML; loading it gives the same settings."""
    values = resolved_values(config)
    return yaml.dump(
        values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=128, default_flow_style=None
    )


def _without_null(value: dict[str, Any]) -> dict[str, Any]:
    """The mapping without unset values and empty mappings. `action_pattern: null` has a meaning and stays."""
    short: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, dict) and key not in _VERBATIM:
            item = _without_null(item)
        is_set = item is not None or key == "action_pattern"
        if is_set and item != {}:
            short[key] = item
    return short


RESUMED: dict[str, Any] = read_table(__file__, "resume.yaml")


class Difference(NamedTuple):
    """A setting whose value in a saved run (`saved`) differs from its `current` value. None = unset, or not
    used by the run."""

    key: str
    saved: Any
    current: Any

    @property
    def is_refused(self) -> bool:
        """Whether a run refuses to resume with this difference."""
        return bool(self._reason("refused"))

    def _reason(self, table: str) -> str:
        for pattern, reason in RESUMED[table].items():
            if fnmatch(self.key, pattern):
                return str(reason)
        return ""

    def __str__(self) -> str:
        text = f"{self.key}: {_shown(self.saved)} → {_shown(self.current)}"
        reason = self._reason("refused") or self._reason("taken_over")
        if reason:
            text += f" ({reason})"
        return text


def _shown(value: Any) -> str:
    if value is None:
        return "unset"
    return repr(value)


def differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[Difference]:
    """The settings that differ between two `resolved_values`, ordered as in `current`. Leaves out `places` of
    `resume.yaml`.

    >>> for difference in differences({"seed": 1}, {"seed": 2, "critic": {"b": True}}):
    ...     print(difference)
    seed: 1 → 2 (tasks, tokens and the order of training follow from it)
    critic.b: unset → True
    """
    flat_saved = dict(leaves(saved))
    flat_current = dict(leaves(current))
    for flat in (flat_saved, flat_current):
        with suppress(KeyError, TypeError):  # only supervised fine-tuning has training_args at its top level
            batch_size = flat["training_args.per_device_train_batch_size"]
            num_batches = flat["training_args.gradient_accumulation_steps"]
            num_devices = len(flat.get("device_mapping") or [0])
            flat["samples of an optimiser step"] = batch_size * num_batches * num_devices
    pairs = [Difference(key, flat_saved.get(key), flat_current.get(key)) for key in flat_current | flat_saved]
    compared = [pair for pair in pairs if pair.key not in RESUMED["places"]]
    return [pair for pair in compared if pair.saved != pair.current]


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """`(dotted key, value)` of every setting."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{key}.")
        else:
            yield key, value
