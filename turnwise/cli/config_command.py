"""`turnwise config FILE [KEY=VALUE ...]`: the resolved config, the settings in force, and missing features or libraries."""

import argparse
import json
from collections.abc import Iterator, Sequence

from turnwise.build.prepare import lacking_here
from turnwise.cluster.placement import place
from turnwise.config import AgenticConfig, SFTConfig, describe
from turnwise.config.dump import dump_yaml, resolved_values
from turnwise.config.problems import Problem
from turnwise.errors import ConfigError, NotAvailableError
from turnwise.examine.examined import Examined, ExaminedSFT
from turnwise.examine.problems import problems
from turnwise.examine.read import load_any_examined
from turnwise.pipelines.interrupt import ends_at_once


@ends_at_once()
def run(arguments: argparse.Namespace) -> int:
    """Prints the resolved config, the settings in force, and where roles run. Returns 0 even if the config can't run here."""
    missing = list[str]()

    def find(examined: Examined | ExaminedSFT) -> Iterator[Problem]:
        try:
            yield from problems(examined, may_miss=True)
        except NotAvailableError as error:
            missing.append(str(error))

    try:
        examined, notes = load_any_examined(arguments.config, arguments.overrides, arguments.strict, find)
    except ConfigError as error:
        if arguments.all:
            raise ConfigError(error.complete) from None
        raise
    config = examined.config
    table = describe(config)
    table.missing.extend([*missing, *lacking_here(config)])
    notes = [note for note in notes if note not in table.warnings]
    if arguments.json:
        content = {
            "config": resolved_values(config),
            "applied": dict(table.rows),
            "notes": notes,
            "warnings": table.warnings,
            "missing": table.missing,
            "placement": placement_table(config).splitlines(),
        }
        print(json.dumps(content, indent=2, ensure_ascii=False))
        return 0
    print(dump_yaml(config))
    print("\n".join(["# what this applies", table.render(), *(f"note: {note}" for note in notes)]))
    print(f"\n# where the roles run\n{placement_table(config)}")
    return 0


def placement_table(config: AgenticConfig | SFTConfig) -> str:
    """A table of the devices that the config names and the roles on each. This machine needn't have the devices."""
    mappings = config.device_mappings
    is_apart = config.trains_apart and not any(len(named or ()) > 1 for named in mappings.values())
    own = config.server_devices
    highest = max((device for named in (*mappings.values(), own) for device in named or ()), default=0)
    placement = place(mappings, num_devices=highest + 1, accelerator="", is_apart=is_apart)
    served: dict[str, Sequence[Sequence[int] | None]] = {}
    where = "training in this process" if placement.cluster == "local" else "a process for each training device"
    if isinstance(config, AgenticConfig):
        size = config.num_replicas
        served["actor_infer"] = config.replica_devices or [None]
        if config.needs_reward_role:
            served["reward"] = [own[:1]] if own and config.trains_apart else [None]
        where += f"; {size} inference processes" if size > 1 else "; sampling in this process"
    return f"{placement.table(served)}\n({where})"
