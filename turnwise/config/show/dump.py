"""Writes a resolved config as YAML, and compares two configs. `resume.yaml` names the differences that forbid
resuming."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from fnmatch import fnmatch
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


_Dumper.add_representer(
    str,
    lambda dumper, value: dumper.represent_scalar(
        "tag:yaml.org,2002:str", value, style="|" if "\n" in value else None
    ),
)
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
        for key in (key for keys in UNREAD[name].values() for key in keys):
            section, _, last = key.rpartition(".")
            (values[name][section] if section else values[name]).pop(last, None)
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
    nested = {
        key: _without_null(item)
        for key, item in value.items()
        if isinstance(item, dict) and key not in _VERBATIM
    }
    found = (value | nested).items()
    return {key: item for key, item in found if item != {} and (item is not None or key == "action_pattern")}


RESUMED: dict[str, Any] = read_table(__file__, "resume.yaml")


class Difference(NamedTuple):
    """A setting whose value in a saved run (`saved`) differs from its value `now`. None = unset, or not used
    by the run."""

    key: str
    saved: Any
    now: Any

    @property
    def is_refused(self) -> bool:
        """Whether a run refuses to resume with this difference."""
        return bool(self._reason("refused"))

    def _reason(self, table: str) -> str:
        return next((reason for pattern, reason in RESUMED[table].items() if fnmatch(self.key, pattern)), "")

    def __str__(self) -> str:
        reason = self._reason("refused") or self._reason("taken_over")
        saved, now = ("unset" if value is None else repr(value) for value in (self.saved, self.now))
        return f"{self.key}: {saved} → {now}" + (f" ({reason})" if reason else "")


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """The settings that differ between two `resolved_values`, ordered as in `now`. Leaves out `places` of
    `resume.yaml`.

    >>> [str(d) for d in differences({"seed": 1, "critic": {"a": 2}}, {"seed": 2, "critic": {"a": 2, "b":
    True}})] ['seed: 1 → 2 (tasks, tokens and the order of training follow from it)', 'critic.b: unset →
    True']
    """
    before, after = dict(leaves(saved)), dict(leaves(now))
    for flat in (before, after):
        with suppress(KeyError, TypeError):  # only supervised fine-tuning has training_args at its top level
            sizes = [
                flat[f"training_args.{name}"]
                for name in ("per_device_train_batch_size", "gradient_accumulation_steps")
            ]
            flat["samples of an optimiser step"] = (
                sizes[0] * sizes[1] * len(flat.get("device_mapping") or [0])
            )
    keys = [key for key in dict.fromkeys([*after, *before]) if key not in RESUMED["places"]]
    return [
        Difference(key, before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)
    ]


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """`(dotted key, value)` of every setting."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{key}.")
        else:
            yield key, value
