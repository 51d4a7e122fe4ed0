"""The placement of a config, for people. It imports no torch and touches no device."""

from __future__ import annotations

from turnwise.cluster.placement import place
from turnwise.config import AgenticConfig, SFTConfig


def placement_table(config: AgenticConfig | SFTConfig) -> str:
    """Roles by devices as the config asks for them, whether this machine has these devices or not.

    Raises:
        ConfigError: the cluster that is asked for can't hold the roles.
    """
    mappings = config.device_mappings
    is_apart = config.trains_apart and not any(len(named or ()) > 1 for named in mappings.values())
    own = config.actor_infer.device_mapping if isinstance(config, AgenticConfig) else None
    highest = max((device for named in (*mappings.values(), own) for device in named or ()), default=0)
    placement = place(mappings, num_devices=highest + 1, accelerator="", is_apart=is_apart)
    homes: list[int | None] = []
    if isinstance(config, AgenticConfig):
        size, has_own = config.num_replicas, own and (config.trains_apart or config.num_replicas > 1)
        homes = [own[replica * len(own) // size] for replica in range(size)] if own and has_own else [None]
    where = "training in this process" if placement.cluster == "local" else "a process for each training device"
    if homes:
        where += f"; {len(homes)} inference processes" if len(homes) > 1 else "; sampling in this process"
    return f"{placement.table(homes)}\n({where})"
