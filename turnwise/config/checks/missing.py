"""Finds what a valid config needs but this version, installation or machine lacks. A run then refuses to
start."""

import os
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from turnwise.config.checks.contradictions import named_models
from turnwise.config.demand import ray_reason
from turnwise.config.schema.agentic import AgenticConfig
from turnwise.config.schema.model_args import Role
from turnwise.config.schema.sft import SFTConfig
from turnwise.errors import ModelError, NotAvailableError, install_hint
from turnwise.model_files.folder import (
    NEEDS_EXPORT,
    NO_TOKENIZER,
    NO_WEIGHTS,
    base_of_adapter,
    folder_here,
    has_tokenizer,
    has_weights,
    needs_export,
)
from turnwise.model_files.hub import check_hub_name
from turnwise.runtime.machine import Machine, ray_sign
from turnwise.spec import AGENTS, MLFLOW_OF_TRACES, ROWS_TAG, STRATEGIES, TRACKERS, Split

_MODULES = {"megatron": "megatron.core"}  # extra → its module, where the names differ


def require(missing: Sequence[str]) -> None:
    """Raises NotAvailableError with the sentences of `missing`, if there are any."""
    if missing:
        lines = [f"  - {line}" for line in missing]
        raise NotAvailableError("\n".join(["this config is valid, but can't run here:", *lines]))


def unavailable(config: AgenticConfig | SFTConfig) -> list[str]:
    """A sentence for every setting in use whose feature or library is missing. Models and folders are left to
    `not_here`."""
    lines: list[str] = []
    if isinstance(config, SFTConfig):
        lines += _role("", config)
    else:
        for name, role in config.active_roles.items():
            lines += _role(f"{name}.", role)
        lines += _environments(config, [*config.train_env_manager.tags, *config.val_env_manager.tags])
        lines += _checkers(config)
        lines += _trace(config)
    lines += _trackers(config.track_with)
    lines += _ray(config)
    return lines


def not_here(config: AgenticConfig | SFTConfig) -> list[str]:
    """A sentence for every model that is incomplete, or that is neither on this machine nor named like a
    model on the hub, and for every folder that can't be written to. Devices are checked elsewhere, by
    `place`."""
    return [*dict.fromkeys(_models(config)), *_places(config)]


def unavailable_to_play(config: AgenticConfig, split: Split = "val") -> list[str]:
    """A sentence for each feature or library that is missing to play a split with a saved model. Training
    needs more."""
    played = _environments(config, config.env_manager(split).tags)
    return [*_role("actor_infer.", config.actor_infer), *played, *_checkers(config)]


def _role(prefix: str, role: Role | SFTConfig) -> Iterator[str]:
    if prefix == "reward." and len(role.device_mapping or ()) > 1:
        yield "reward.device_mapping: reward on several devices isn't supported yet."
    name = role.strategy_args.strategy_name
    path = f"{prefix}strategy_args.strategy_name"
    spec = STRATEGIES[name]
    is_attached = spec.attaches_by in role.strategy_args.strategy_config
    if not spec.is_available:
        same_kind = {key: strategy for key, strategy in STRATEGIES.items() if strategy.kind == spec.kind}
        available = [key for key, strategy in same_kind.items() if strategy.is_available]
        instead = f"; {spec.instead}" if spec.instead else ""
        yield f"{path}: {name} isn't supported yet{instead}; available: {', '.join(available)}."
    elif prefix == "reward." and spec.is_sharded:
        yield f"{path}: {name} isn't supported yet for reward, which has one device; use torch_infer."
    elif spec.extra and not is_attached and not _is_installed(_MODULES.get(spec.extra, spec.extra)):
        yield f"{path}: {name} needs a library that isn't installed; {install_hint(spec.extra)}."
    if spec.kind == "train" and role.model_args.has_adapter and not _is_installed("peft"):
        yield f"{prefix}model_args.lora_rank: LoRA needs peft, which isn't installed; {install_hint('rl')}."
    if role.model_args.attn_implementation == "fa2" and not _is_installed("flash_attn"):
        yield (
            f"{prefix}model_args.attn_implementation: fa2 needs the flash-attn package and a CUDA device; "
            "use auto here."
        )
    if not spec.has_options and role.strategy_args.strategy_config:
        names = [key for key, strategy in STRATEGIES.items() if not strategy.has_options]
        options = f"an option of {' or '.join(names)}"
        yield f"{prefix}strategy_args.strategy_config: {options} isn't supported yet."


def _environments(config: AgenticConfig, tags: Iterable[str]) -> Iterator[str]:
    if ROWS_TAG in tags and AGENTS.get(config.data.default_agent) == "":
        yield f"data.default_agent: {config.data.default_agent} isn't supported yet."
    if ROWS_TAG in tags and config.data.default_agent == "react_agent":
        for module in ("langgraph", "langchain"):
            if not _is_installed(module):
                yield (
                    f"data.default_agent: react_agent needs {module}, which isn't installed; "
                    f"{install_hint('langgraph')}."
                )
    if config.names_gateway and not _is_installed("aiohttp"):
        yield f"agent_name: gateway needs aiohttp, which isn't installed; {install_hint('gateway')}."
    for tag in dict.fromkeys(tags):
        if tag not in config.custom_envs:
            continue
        env = config.custom_envs[tag]
        if AGENTS.get(env.agent_name) == "":
            yield f"custom_envs.{tag}.agent_name: {env.agent_name} isn't supported yet."
        if env.departs("tools"):
            yield f"custom_envs.{tag}.tools: a tool in an environment isn't supported yet."


def _checkers(config: AgenticConfig) -> Iterator[str]:
    if "math_verify" in config.data.checkers and not _is_installed("math_verify"):
        yield f"data.checker: math_verify needs a library that isn't installed; {install_hint('math')}."


def _ray(config: AgenticConfig | SFTConfig) -> Iterator[str]:
    reason = ray_reason(config, Machine(ray_sign=ray_sign()))
    if reason and not _is_installed("ray"):
        yield (
            f"{reason}: so the run uses Ray, which isn't installed; {install_hint('ray')}, or set "
            "cluster.name: process to use this machine alone."
        )


def _trace(config: AgenticConfig) -> Iterator[str]:
    if config.trace.backend != "mlflow":
        return
    if not _is_installed("mlflow"):
        yield f"trace.backend mlflow needs a library that isn't installed; {install_hint('mlflow')}."
        return
    version = metadata.version("mlflow")
    if not version.startswith(f"{MLFLOW_OF_TRACES}."):
        yield (
            f"trace.backend mlflow works with MLflow {MLFLOW_OF_TRACES}, and {version} is installed: install "
            f"mlflow=={MLFLOW_OF_TRACES}.*, or use trace.backend jsonl."
        )


def _trackers(names: list[str]) -> Iterator[str]:
    for name in names:
        extra = TRACKERS[name].extra
        if extra and not _is_installed(extra):
            yield f"track_with {name} needs a library that isn't installed; {install_hint(extra)}."


def _models(config: AgenticConfig | SFTConfig) -> Iterator[str]:
    for number, (key, model) in enumerate(named_models(config)):
        folder = folder_here(model.model_name_or_path)
        if folder is None:
            try:
                check_hub_name(model.model_name_or_path)
            except ModelError as error:
                yield f"{key}: {error}"
        elif base_of_adapter(folder) is None:
            # The other models read the token ids of the first, which is trained.
            if number == 0 and not has_tokenizer(folder):
                yield f"{key}: {model.model_name_or_path}: {NO_TOKENIZER}."
            if needs_export(folder):
                yield f"{key}: {model.model_name_or_path}: {NEEDS_EXPORT}."
            elif not has_weights(folder):
                yield f"{key}: {model.model_name_or_path}: {NO_WEIGHTS}."


def _places(config: AgenticConfig | SFTConfig) -> Iterator[str]:
    """A sentence for each folder that the run couldn't make or write into; `output_dir` only if the run isn't
    to resume."""
    folders: dict[str, str | None] = {"logging_dir": config.logging_dir}
    if isinstance(config, AgenticConfig) and config.uses_validation:
        folders["render_save_dir"] = config.render_save_dir
    folders["checkpoint_config.output_dir"] = config.checkpoint_config.output_dir
    if config.resume_from_checkpoint is False:
        folders["output_dir"] = os.path.join(config.output_dir, config.exp_name)
    for key, path in folders.items():
        if path is None:
            continue
        place = Path(path).absolute()
        while not os.path.lexists(place):
            place = place.parent
        try:
            # Whether this process may write there is only known by trying: this makes a folder and removes
            # it.
            TemporaryDirectory(dir=place).cleanup()
        except OSError as fault:
            yield (
                f"{key}: {path} can't be written ({place}: {fault.strerror}); name another folder, or allow "
                "it."
            )


def _is_installed(module: str) -> bool:
    """Whether a module could be imported. Only its parent package is imported, if it has one."""
    parent = module.rpartition(".")[0]
    if parent and find_spec(parent) is None:
        return False
    return find_spec(module) is not None
