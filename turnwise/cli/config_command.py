"""`turnwise config FILE [overrides]`: the resolved config, the settings in force, and missing features or libraries."""

from __future__ import annotations

import argparse
import json

from turnwise.build.placement_table import placement_table
from turnwise.build.prepare import lacking_here, problems_here
from turnwise.config import describe, load_any_config
from turnwise.config.dump import dump_yaml, resolved_values


def run(arguments: argparse.Namespace) -> int:
    """Prints; returns 0 for every valid config, even if it can't run here.

    Raises:
        ConfigError: the config is wrong; with `--strict`, also where a key has no effect.
    """
    config, notes = load_any_config(arguments.config, arguments.overrides, strict=arguments.strict, examine=problems_here)
    applied = describe(config)
    applied.missing.extend(lacking_here(config))
    notes = [note for note in notes if note not in applied.warnings]
    if arguments.json:
        content = {
            "config": resolved_values(config),
            "applied": dict(applied.rows),
            "notes": notes,
            "warnings": applied.warnings,
            "missing": applied.missing,
            "placement": placement_table(config).splitlines(),
        }
        print(json.dumps(content, indent=2, ensure_ascii=False))
        return 0
    print(dump_yaml(config))
    print("\n".join(["# what this applies", applied.render(), *(f"note: {note}" for note in notes)]))
    print(f"\n# where the roles run\n{placement_table(config)}")
    return 0
