"""`turnwise config FILE [KEY=VALUE ...]`: the resolved config, the settings in force, and missing features or
libraries."""

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace

from turnwise.assemble.prepare import lacking_here
from turnwise.config import describe
from turnwise.config.place import place, smallest_machine
from turnwise.config.problems import Problem
from turnwise.config.show.device_memory import device_memory
from turnwise.config.show.dump import dump_yaml, resolved_values
from turnwise.errors import ConfigError, NotAvailableError
from turnwise.examine.examined import Examined, ExaminedSFT
from turnwise.examine.problems import problems
from turnwise.examine.read import load_any_examined
from turnwise.lifecycle.interrupt import ends_at_once
from turnwise.runtime.machine import ray_sign


@ends_at_once()
def run(arguments: argparse.Namespace) -> int:
    """Prints the resolved config, the settings in force, and where roles run. Returns 0 even if the config
    can't run here."""
    missing = list[str]()

    def find(examined: Examined | ExaminedSFT) -> Iterator[Problem]:
        try:
            yield from problems(examined, may_miss=True)
        except NotAvailableError as error:
            missing.append(str(error))

    try:
        examined, notes = load_any_examined(
            arguments.config,
            arguments.overrides,
            arguments.strict,
            find,
        )
    except ConfigError as error:
        if arguments.all:
            raise ConfigError(error.complete) from None
        raise
    config = examined.config
    placement = place(
        config, replace(smallest_machine(config), ray_sign=ray_sign())
    )  # this machine needn't have its devices
    table = describe(config, placement)
    table.missing.extend([*missing, *lacking_here(config)])
    notes = [note for note in notes if note not in table.warnings]
    if arguments.json:
        content = {
            "config": resolved_values(config),
            "applied": dict(table.rows),
            "notes": notes,
            "warnings": table.warnings,
            "missing": table.missing,
            "placement": placement.table().splitlines(),
            "device_memory": device_memory(config, placement).splitlines(),
        }
        print(json.dumps(content, indent=2, ensure_ascii=False))
        return 0
    print(dump_yaml(config))
    print("\n".join(["# what this applies", table.render(), *(f"note: {note}" for note in notes)]))
    print(f"\n# where the roles run\n{placement.table()}")
    held = device_memory(config, placement)
    if held:
        print(f"\n# estimated memory of each device\n{held}")
    return 0
