"""Features that this version, or this installation, lacks. A valid config that asks for one passes only `turnwise config`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec

from turnwise.config.roles import Role
from turnwise.config.schema import AgenticConfig, Split
from turnwise.config.sft import SFTConfig
from turnwise.errors import NotAvailableError
from turnwise.spec import AGENTS, ENVS, ROWS_TAG, STRATEGIES, TRACKERS

_MODULES = {"megatron": "megatron.core"}
"""Modules of extras with a name that differs from the extra's."""
_WITHOUT_OPTIONS = ("torch_train", "torch_infer")
"""Strategies to which strategy_config has nothing to say."""

MISSING_IN_PLAY = {"trace.backend": "tracing"}
"""Keys of features that this version lacks and that evaluation needs as well as training. Implementing one deletes its line."""


def require(missing: Sequence[str]) -> None:
    """Refuses to run if something is missing.

    Raises:
        NotAvailableError: with every sentence of `missing`.
    """
    if missing:
        raise NotAvailableError("this config is valid, but can't run here:\n" + "\n".join(f"  - {line}" for line in missing))


def unavailable(config: AgenticConfig | SFTConfig) -> list[str]:
    """A sentence for every setting in use whose feature or library is missing; empty if the config can train."""
    shared = list(_trackers(config.track_with))
    if isinstance(config, SFTConfig):
        return [*_role("", config), *shared]
    return [
        *(line for name, role in config.active_roles.items() for line in (*_role(f"{name}.", role), *_devices(name, role))),
        *_environments(config, [*config.train_env_manager.tags, *config.val_env_manager.tags]),
        *_lacking(config),
        *shared,
    ]


def unavailable_to_play(config: AgenticConfig, split: Split = "val") -> list[str]:
    """What this version lacks to play the tasks of a split with a saved model, without the needs of training."""
    manager = config.env_manager(split)
    return [
        *_role("actor_infer.", config.actor_infer),
        *_devices("actor_infer", config.actor_infer),
        *_environments(config, manager.tags),
        *_lacking(config),
    ]


def _lacking(config: AgenticConfig) -> Iterator[str]:
    for key, what in MISSING_IN_PLAY.items():
        if config.departs(key):
            yield f"{key}: {what} isn't in this version."


def _role(prefix: str, role: Role | SFTConfig) -> Iterator[str]:
    name = role.strategy_args.strategy_name
    spec, path = STRATEGIES[name], f"{prefix}strategy_args.strategy_name"
    if not spec.is_available:
        same = ", ".join(other for other, known in STRATEGIES.items() if known.kind == spec.kind and known.is_available)
        yield f"{path}: {name} isn't in this version, which has {same}."
    elif (
        spec.extra
        and "url" not in role.strategy_args.strategy_config
        and not _is_installed(_MODULES.get(spec.extra, spec.extra))
    ):
        yield f"{path}: {name} needs a library that isn't installed; pip install 'turnwise[{spec.extra}]'."
    if spec.kind == "train" and role.model_args.has_adapter and not _is_installed("peft"):
        yield f"{prefix}model_args.lora_rank: LoRA needs peft, which isn't installed; pip install 'turnwise[rl]'."
    if name in _WITHOUT_OPTIONS and role.strategy_args.strategy_config:
        options = f"an option of {' or '.join(_WITHOUT_OPTIONS)}"
        yield f"{prefix}strategy_args.strategy_config: {options} isn't in this version."


def _devices(name: str, role: Role) -> Iterator[str]:
    if len(role.device_mapping or ()) > 1 and name == "reward":
        yield f"{name}.device_mapping: {name} on several devices isn't in this version."


def _environments(config: AgenticConfig, tags: Iterable[str]) -> Iterator[str]:
    if ROWS_TAG in tags and AGENTS.get(config.data.default_agent) == "":
        yield f"data.default_agent: {config.data.default_agent} isn't in this version."
    for tag in dict.fromkeys(tags):
        if (env := config.custom_envs.get(tag)) is None:
            continue
        if ENVS.get(env.env_type) == "":
            yield f"custom_envs.{tag}.env_type: {env.env_type} isn't in this version."
        if AGENTS.get(env.agent_name) == "":
            yield f"custom_envs.{tag}.agent_name: {env.agent_name} isn't in this version."
        if env.departs("tools"):
            yield f"custom_envs.{tag}.tools: a tool in an environment isn't in this version."


def _trackers(names: list[str]) -> Iterator[str]:
    for name in names:
        if (extra := TRACKERS[name].extra) and not _is_installed(extra):
            yield f"track_with {name} needs a library that isn't installed; pip install 'turnwise[{extra}]'."


def _is_installed(module: str) -> bool:
    """Whether a module could be imported, without importing it (its parent packages are namespaces at most)."""
    parent, _, _ = module.rpartition(".")
    return (not parent or find_spec(parent) is not None) and find_spec(module) is not None
