"""Estimates what each device of a run holds, from the models' config.json."""

from collections.abc import Iterator
from dataclasses import dataclass

from turnwise.config.own_transfer import copy_devices
from turnwise.config.schema.agentic import AgenticConfig
from turnwise.config.schema.model_shape import ModelShape
from turnwise.config.schema.sft import SFTConfig
from turnwise.config.show.sizes import (
    cache_bytes,
    critic_shape,
    episodes_at_once,
    keeps_weights,
    shards,
    trained_model,
)
from turnwise.costs.model import BYTES, NUM_MOMENTS, WEIGHT_BYTES, Sampler, bytes_text
from turnwise.runtime.placement import Placement

_COPIES = "weights for engines"


@dataclass(frozen=True)
class RoleMemory:
    """What a role holds on each of its devices."""

    num_bytes: int
    arithmetic: str
    """How the bytes were computed."""


def device_memory(config: AgenticConfig | SFTConfig, placement: Placement) -> str:
    """A line for each device with the estimated memory of the roles on it, then how that was computed. Empty
    if the model's sizes aren't known."""
    shape = config.model_shape()
    if shape is None:
        return ""
    if isinstance(config, SFTConfig):
        roles = {"sft": _trained(config, "sft", shape, shape.num_parameters, placement)}
    else:
        roles = dict(_roles(config, shape, placement))
    devices = {name: placed.devices for name, placed in {**placement.roles, **placement.served}.items()}
    if isinstance(config, AgenticConfig):
        copies = copy_devices(config, placement)
        if copies:
            devices[_COPIES] = copies
            roles[_COPIES] = _copy(config, shape)
    lines: list[str] = []
    for device in placement.all_devices:
        held = [name for name in roles if device in devices[name]]
        total = sum(roles[name].num_bytes for name in held)
        parts = [f"{name} {bytes_text(roles[name].num_bytes)}" for name in held]
        lines.append(f"device {device}: {bytes_text(total)} ({', '.join(parts)})")
    lines += [f"{name}: {memory.arithmetic}" for name, memory in roles.items()]
    return "\n".join([*lines, f"{_time(config, placement)}; activations come on top"])


def _roles(
    config: AgenticConfig, shape: ModelShape, placement: Placement
) -> Iterator[tuple[str, RoleMemory]]:
    for name in placement.roles:
        if name == "critic":
            sizes = critic_shape(config, shape)
            yield name, _trained(config, name, sizes, sizes.num_value_parameters, placement)
        elif name == "actor_train":
            yield name, _trained(config, name, shape, shape.num_parameters, placement)
        else:
            frozen = f"{shape.num_parameters:,} parameters × {WEIGHT_BYTES} bytes"
            yield name, RoleMemory(WEIGHT_BYTES * shape.num_parameters, frozen)
    yield "actor_infer", _server(config, shape, placement)


def _trained(
    config: AgenticConfig | SFTConfig,
    name: str,
    shape: ModelShape,
    num_parameters: int,
    placement: Placement,
) -> RoleMemory:
    role = config if isinstance(config, SFTConfig) else config.roles[name]
    model = trained_model(role.model_args, shape, num_parameters)
    num_shards = shards(role, placement.of(name).size)
    each = (2 + NUM_MOMENTS) * WEIGHT_BYTES
    what = f"weights, gradients and {NUM_MOMENTS} moments of {WEIGHT_BYTES} bytes"
    text = f"{model.num_trained:,} trained parameters × {each} bytes ({what})"
    if model.frozen_bytes:
        text += f" + {num_parameters:,} frozen × {WEIGHT_BYTES} bytes"
    if num_shards > 1:
        text = f"({text}) / {num_shards} ranks"
    return RoleMemory((model.frozen_bytes + model.trained_bytes) // num_shards, text)


def _server(config: AgenticConfig, shape: ModelShape, placement: Placement) -> RoleMemory:
    """What a replica holds on each of its devices."""
    role = config.actor_infer
    dtype = role.model_args.dtype
    num_servers = placement.num_servers
    num_devices = role.model_parallel_size
    sampler = Sampler(shape.num_parameters, dtype, num_servers)
    cache = cache_bytes(config, shape, sampler) // num_servers
    each = shape.kv_bytes_per_token(dtype)
    text = (
        f"at most {bytes_text(cache)} keys and values a replica ({episodes_at_once(config)} contexts of "
        f"{config.sequence_length} tokens × {each:,} bytes, kv_cache_bytes)"
    )
    weights = 0
    if keeps_weights(config, placement):
        weights = sampler.weight_bytes // num_servers
        text = f"{shape.num_parameters:,} parameters × {BYTES[dtype]} bytes + {text}"
    if num_devices > 1:
        text = f"({text}) / {num_devices} devices"
    return RoleMemory((weights + cache) // num_devices, text)


def _copy(config: AgenticConfig, shape: ModelShape) -> RoleMemory:
    """What a trainer's rank holds for engines that get weights by their own transfer."""
    width = BYTES[config.actor_infer.model_args.dtype]
    text = f"{shape.num_parameters:,} parameters × {width} bytes (weight_transfer_config)"
    return RoleMemory(width * shape.num_parameters, text)


def _time(config: AgenticConfig | SFTConfig, placement: Placement) -> str:
    """When a device holds it."""
    if isinstance(config, SFTConfig):
        return "the whole time"
    shared = set(placement.devices) & set(placement.of("actor_infer").devices)
    if not shared:
        return "training and sampling have devices of their own, and hold this the whole time"
    if config.plays_ahead:
        return "all of it is there at the same time"
    return (
        "on shared GPUs training and sampling take turns: keys and values leave while training computes, "
        "moments and gradients while rollouts are played (on a CPU all of it is there at the same time)"
    )
