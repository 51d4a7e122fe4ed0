"""The option by which an engine's own processes receive the weights, without a copy on the host."""

from collections.abc import Iterator
from typing import Literal

from turnwise.config.problems import Problem
from turnwise.config.schema.agentic import AgenticConfig
from turnwise.config.schema.model_args import PlacedModel
from turnwise.errors import ConfigError
from turnwise.runtime.placement import Placement
from turnwise.spec import OWN_TRANSFER

Backend = Literal["gloo", "nccl", "ipc"]

_ENGINES = ("vllm", "sglang")
_VALUES = [{"backend": backend} for backend in ("gloo", "nccl", "ipc")]
_KEY = f"actor_infer.strategy_args.strategy_config.{OWN_TRANSFER}"
_REMOVE = "or remove it, and weights reach the engine through memory of its node"


def own_transfer(role: PlacedModel) -> Backend | None:
    """The way of the weights into a role's engine that its option names, if it has the option."""
    strategy = role.strategy_args
    value = strategy.strategy_config.get(OWN_TRANSFER)
    if strategy.strategy_name not in _ENGINES or value not in _VALUES:
        return None
    backend: Backend = value["backend"]
    return backend


def option_problems(path: str, role: PlacedModel) -> Iterator[Problem]:
    """What is wrong with the option, whatever the devices are. `path` is that of `strategy_args`."""
    options = role.strategy_args.strategy_config
    value = options.get(OWN_TRANSFER)
    if value is None:
        return
    sentence = ""
    if not path.startswith("actor_infer."):
        sentence = "only actor_infer gets other weights in a run; remove it"
    elif value not in _VALUES:
        sentence = (
            f"{value!r} isn't a transfer that the trainer can send to; use {{backend: nccl}} from GPUs to "
            f"other GPUs, {{backend: ipc}} on the trainer's GPUs, {{backend: gloo}} over the host, {_REMOVE}"
        )
    elif role.strategy_args.strategy_name == "sglang" and role.pipeline_parallel_size > 1:
        sentence = f"SGLang takes weights by its own transfer without pipeline stages; set tp_size, {_REMOVE}"
    elif value == {"backend": "ipc"} and "url" in options:
        sentence = (
            f"ipc reaches only processes that the run has started, and not the server at {options['url']}; "
            f"use {{backend: nccl}}, {_REMOVE}"
        )
    if sentence:
        yield Problem.at(f"{path}.strategy_config.{OWN_TRANSFER}", sentence)


def require_transfer(config: AgenticConfig, placement: Placement) -> None:
    """Raises ConfigError if the weights can't take the way that the option of `actor_infer` names, from
    where the trainer is."""
    backend = own_transfer(config.actor_infer)
    if backend is None or not placement.num_servers:
        return
    if not placement.trains_apart:
        # The trainer sends while the run's process waits for the engines.
        raise ConfigError(
            f"{_KEY} needs a trainer in a process of its own; set cluster.name: process or ray, {_REMOVE}"
        )
    has_gpus = placement.accelerator == "cuda"
    trained = placement.of("actor_train").devices
    sender = _sender_device(placement)
    served = set(placement.of("actor_infer").devices)
    if "url" in config.actor_infer.strategy_args.strategy_config:
        served = set()  # it has devices of its own
    if backend == "nccl" and not has_gpus:
        raise ConfigError(f"{_KEY}: nccl connects GPUs, and this run has none; use {{backend: gloo}}")
    if backend == "nccl" and sender in served:
        raise ConfigError(
            f"{_KEY}: nccl connects different GPUs, and the trainer's rank that sends shares device "
            f"{sender} with actor_infer; use {{backend: ipc}}, other devices, {_REMOVE}"
        )
    if backend == "ipc" and not served <= set(trained):
        others = ", ".join(map(str, sorted(served.difference(trained))))
        raise ConfigError(
            f"{_KEY}: ipc hands weights over on a device, and no rank of actor_train is on {others}; use "
            f"{{backend: nccl}}, give actor_train these devices too, {_REMOVE}"
        )
    if backend == "ipc" and not has_gpus and config.actor_infer.strategy_args.strategy_name == "sglang":
        raise ConfigError(f"{_KEY}: SGLang takes ipc on GPUs only, and this run has none; {_REMOVE[3:]}")


def copy_devices(config: AgenticConfig, placement: Placement) -> tuple[int, ...]:
    """The GPUs on which the trainer's ranks hold a copy of the weights for engines."""
    backend = own_transfer(config.actor_infer)
    if placement.accelerator != "cuda":
        return ()
    if backend == "ipc":
        return placement.of("actor_infer").devices
    if backend == "nccl":
        return (_sender_device(placement),)
    return ()


def _sender_device(placement: Placement) -> int:
    """The device of the trainer's rank that has the whole weights."""
    trained = placement.of("actor_train")
    return trained.ranks[trained.layout.speaker][0]
