"""Rules of training on devices of inference servers. With no device named for either role both are on the
first one, which these rules leave alone."""

from turnwise.config.checks.rules.rule import Rule
from turnwise.config.schema.agentic import AgenticConfig


def shared_devices(config: AgenticConfig) -> set[int]:
    """The devices that are named for training and for inference."""
    return set(config.actor_train.device_mapping or ()) & set(config.actor_infer.device_mapping or ())


def has_other_devices(config: AgenticConfig) -> bool:
    """Whether inference has devices on which the policy isn't trained."""
    return bool(set(config.actor_infer.device_mapping or ()) - set(config.actor_train.device_mapping or ()))


def trains_on_a_part(config: AgenticConfig) -> bool:
    """Whether the policy's devices are a proper subset of those of inference."""
    trained = set(config.actor_train.device_mapping or ())
    return bool(trained) and trained < set(config.actor_infer.device_mapping or ())


def num_staying(config: AgenticConfig) -> int:
    """The number of replicas none of whose devices train the policy."""
    devices = config.actor_infer.device_mapping or ()
    size = config.actor_infer.model_parallel_size
    replicas = [devices[start : start + size] for start in range(0, len(devices), size)]
    return sum(shared_devices(config).isdisjoint(replica) for replica in replicas)


LENDING_RULES: tuple[Rule[AgenticConfig], ...] = (
    Rule(
        "actor_train.device_mapping",
        when=lambda c: not c.plays_ahead and trains_on_a_part(c),
        says=lambda c: (
            "is a part of actor_infer's devices. Replicas lend devices to training only in an "
            "asynchronous run, where the others go on sampling; here all of them would wait. Set "
            "async_generation_ratio to at least 1, or give both roles the same devices, or different ones"
        ),
    ),
    Rule(
        "actor_train.device_mapping",
        when=lambda c: c.plays_ahead and shared_devices(c) and not has_other_devices(c),
        says=lambda c: (
            "holds all of actor_infer's devices, so that no replica could sample while training computes, "
            "and async_generation_ratio is above 0. Leave some of actor_infer's devices out, or set "
            "async_generation_ratio to 0"
        ),
    ),
    Rule(
        "actor_infer.device_mapping",
        when=lambda c: (
            c.plays_ahead and has_other_devices(c) and _lends(c) and c.actor_infer.data_parallel_size < 2
        ),
        says=lambda c: (
            f"its {len(c.actor_infer.device_mapping or ())} devices are one replica, which can't lend some "
            "to actor_train and sample too; use a smaller tensor-parallel size or more devices, so that "
            "there are at least 2 replicas, or devices that actor_train doesn't have"
        ),
    ),
    Rule(
        "actor_infer.device_mapping",
        when=lambda c: (
            _lends(c) and has_other_devices(c) and c.actor_infer.data_parallel_size > 1 and not num_staying(c)
        ),
        says=lambda c: (
            f"each of its {c.actor_infer.data_parallel_size} replicas has a device of actor_train, so that "
            "none could sample while training computes; give actor_train all devices of one replica before "
            "those of the next"
        ),
    ),
)
"""The conditions of training on a part of inference's devices (ROLL's partial overlap)."""


def _lends(config: AgenticConfig) -> bool:
    """Whether replicas are to leave devices that they share with training. Streamed training leaves them
    there."""
    return config.plays_ahead and not config.is_streamed and bool(shared_devices(config))
