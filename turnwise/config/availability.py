"""What this version, or this installation, lacks. A valid config that asks for it passes `turnwise config` only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec

from turnwise.config.environments import CustomEnv
from turnwise.config.roles import Role
from turnwise.config.schema import AgenticConfig
from turnwise.config.sft import SFTConfig
from turnwise.spec import AGENTS, AVAILABLE_TRACKERS, ENVS, ESTIMATORS, PG_VARIANTS, STRATEGIES, TRACKERS

_MODULES = {"megatron": "megatron.core"}
"""Where the module of an extra isn't called like the extra."""


@dataclass(frozen=True, slots=True)
class Missing:
    """A feature that this version lacks. Implementing it deletes its line of the table."""

    key: str
    is_used: Callable[[AgenticConfig], bool]
    what: str


def _any_env(test: Callable[[CustomEnv], bool]) -> Callable[[AgenticConfig], bool]:
    return lambda config: any(test(env) for env in _used_envs(config).values())


def _any_role(test: Callable[[Role], bool]) -> Callable[[AgenticConfig], bool]:
    return lambda config: any(test(role) for role in config.active_roles.values())


MISSING: tuple[Missing, ...] = (
    Missing("data", lambda c: bool(c.data.train_files), "training on data sets"),
    Missing("agent", lambda c: c.is_set("agent"), "an agent with tools"),
    Missing("custom_envs.*.mode step", _any_env(lambda env: env.mode == "step"), "a fresh context each turn"),
    Missing("custom_envs.*.tools", _any_env(lambda env: bool(env.tools)), "a tool in an environment"),
    Missing(
        "custom_envs.*.use_thread_lock", _any_env(lambda env: env.use_thread_lock), "running blocking environments in a pool"
    ),
    Missing("async_generation_ratio", lambda c: c.async_generation_ratio > 0, "asynchronous training"),
    Missing("on_weight_update", lambda c: c.on_weight_update != "finish", "aborting requests at a weight update"),
    Missing("stale_groups", lambda c: c.stale_groups != "wait", "dropping stale groups"),
    Missing("ratio_type", lambda c: c.ratio_type == "segment", "a ratio over turns"),
    Missing("train_infer_correction", lambda c: c.train_infer_correction is not None, "correction of the sampler's drift"),
    Missing("group_filter", lambda c: c.group_filter is not None, "filtering groups"),
    Missing(
        "reward_normalization", lambda c: "running" in c.reward_normalization.statistics, "normalising by running statistics"
    ),
    Missing("reward", lambda c: c.is_set("reward"), "a reward model"),
    Missing("*.lora_rank", _any_role(lambda role: role.model_args.lora_rank is not None), "LoRA"),
    Missing("*.freeze_module_prefix", _any_role(lambda role: bool(role.model_args.freeze_module_prefix)), "partial training"),
    Missing("*.device_mapping", _any_role(lambda role: len(role.device_mapping or ()) > 1), "a role on several devices"),
    Missing(
        "group_size_redundancy",
        lambda c: c.train_env_manager.group_size_redundancy + c.val_env_manager.group_size_redundancy > 0,
        "playing redundant episodes",
    ),
    Missing("resume_from_checkpoint", lambda c: c.resume_from_checkpoint is not False, "resuming"),
    Missing("render_save_dir", lambda c: c.render_save_dir is not None, "saving pictures of episodes"),
    Missing("trace.backend", lambda c: c.trace.backend is not None, "tracing"),
    Missing("cpu_split", lambda c: c.cpu_split.model_fields_set != set(), "splitting the CPU's threads"),
)


def unavailable(config: AgenticConfig | SFTConfig) -> list[str]:
    """A sentence for every setting in use whose feature or library isn't here; empty where the config can run."""
    if isinstance(config, SFTConfig):
        return list(_sft(config))
    lines = [f"{line.key}: {line.what} isn't in this version." for line in MISSING if line.is_used(config)]
    return [*_algorithm(config), *_roles(config), *_environments(config), *_trackers(config.track_with), *lines]


def _sft(config: SFTConfig) -> Iterator[str]:
    yield from _strategy("strategy_args", config.strategy_args.strategy_name)
    yield from _trackers(config.track_with)
    if config.model_args.lora_rank is not None:
        yield "model_args.lora_rank: LoRA isn't in this version."
    if config.model_args.freeze_module_prefix:
        yield "model_args.freeze_module_prefix: partial training isn't in this version."
    if config.resume_from_checkpoint is not False:
        yield "resume_from_checkpoint: resuming isn't in this version."


def _algorithm(config: AgenticConfig) -> Iterator[str]:
    estimators = ", ".join(name for name, spec in ESTIMATORS.items() if spec.is_available)
    estimator = ESTIMATORS.get(config.adv_estimator)
    if estimator is not None and not estimator.is_available:
        yield f"adv_estimator {config.adv_estimator} isn't in this version, which has {estimators}."
    variants = ", ".join(name for name, spec in PG_VARIANTS.items() if spec.is_available)
    if config.pg_variant not in PG_VARIANTS:
        yield f"pg_variant {config.pg_variant}: losses of your own aren't in this version, which has {variants}."
    elif not PG_VARIANTS[config.pg_variant].is_available:
        yield f"pg_variant {config.pg_variant} isn't in this version, which has {variants}."


def _roles(config: AgenticConfig) -> Iterator[str]:
    for name, role in config.active_roles.items():
        yield from _strategy(f"{name}.strategy_args", role.strategy_args.strategy_name)


def _strategy(path: str, name: str) -> Iterator[str]:
    spec = STRATEGIES[name]
    if not spec.is_available:
        same = ", ".join(other for other, known in STRATEGIES.items() if known.kind == spec.kind and known.is_available)
        yield f"{path}: {name} isn't in this version, which has {same}."
    if spec.extra and not _is_installed(_MODULES.get(spec.extra, spec.extra)):
        yield f"{path}: {name} needs a library that isn't installed; pip install 'turnwise[{spec.extra}]'."


def _environments(config: AgenticConfig) -> Iterator[str]:
    for tag, env in _used_envs(config).items():
        if ENVS.get(env.env_type) == "":
            yield f"custom_envs.{tag}.env_type: {env.env_type} isn't in this version."
        if AGENTS.get(env.agent_name) == "":
            yield f"custom_envs.{tag}.agent_name: {env.agent_name} isn't in this version."


def _used_envs(config: AgenticConfig) -> dict[str, CustomEnv]:
    tags = dict.fromkeys([*config.train_env_manager.tags, *config.val_env_manager.tags])
    return {tag: config.custom_envs[tag] for tag in tags if tag in config.custom_envs}


def _trackers(names: list[str]) -> Iterator[str]:
    for name in names:
        if name not in AVAILABLE_TRACKERS:
            yield f"track_with {name} isn't in this version, which has {', '.join(sorted(AVAILABLE_TRACKERS))}."
        elif (module := TRACKERS[name]) and not _is_installed(module):
            yield f"track_with {name} needs a library that isn't installed; pip install {module}."


def _is_installed(module: str) -> bool:
    """Whether a module could be imported, without importing it (its parent packages are namespaces at most)."""
    parent, _, _ = module.rpartition(".")
    return (not parent or find_spec(parent) is not None) and find_spec(module) is not None
