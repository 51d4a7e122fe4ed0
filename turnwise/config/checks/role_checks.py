"""Checks of the models of a run: their strategies, options, adapters and devices."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from turnwise.config.own_transfer import option_problems
from turnwise.config.problems import Problem
from turnwise.config.schema.agentic import AgenticConfig
from turnwise.config.schema.model_args import ROLES, ModelArgs, PlacedModel, StrategyArgs
from turnwise.config.schema.model_shape import PROJECTIONS
from turnwise.errors import nearest
from turnwise.spec import OWN_TRANSFER, STRATEGIES, fsdp2_options, megatron_options


def role_problems(config: AgenticConfig) -> Iterator[Problem]:
    for name, role in config.roles.items():
        yield from placed_model_problems(f"{name}.", role, ROLES[name]["kinds"], name in config.active_roles)
    yield from _other_norms(config)
    yield from _unlike_sizes(config)
    trained = config.actor_train.model_args.model_name_or_path
    sampled = config.actor_infer.model_args.model_name_or_path
    if sampled != trained:
        yield Problem.at(
            "actor_infer.model_args.model_name_or_path",
            f"{sampled} isn't the model that is trained, actor_train.model_args.model_name_or_path "
            f"{trained}; actor_infer samples from the trained weights, so remove it here",
        )
    if config.needs_critic and config.critic_warmup >= max(config.max_steps, 1):
        message = (
            f"the first {config.critic_warmup} steps train only the critic, and max_steps is "
            f"{config.max_steps}"
        )
        yield Problem.at(
            "critic_warmup",
            f"{message}: the actor would never be trained; use at most {config.max_steps - 1}",
        )


def placed_model_problems(
    prefix: str, role: PlacedModel, kinds: Sequence[str], is_active: bool = True
) -> Iterator[Problem]:
    """Problems of one role, whose keys begin with `prefix`. Its strategy must be of one of the `kinds`."""
    strategy = role.strategy_args.strategy_name
    if STRATEGIES[strategy].kind not in kinds:
        allowed = ", ".join(name for name, spec in STRATEGIES.items() if spec.kind in kinds)
        message = f"{strategy} can't do this role's work; use one of {allowed}"
        yield Problem.at(f"{prefix}strategy_args.strategy_name", message)
    yield from _options(f"{prefix}strategy_args", role.strategy_args, is_active)
    if is_active and strategy in _OPTION_CHECKS:
        yield from _OPTION_CHECKS[strategy](f"{prefix}strategy_args", role)
    if is_active and "train" in kinds:
        yield from _adapters(f"{prefix}model_args", role.model_args)
        rate = role.training_args.learning_rate
        if role.training_args.lr_scheduler_type == "polynomial" and rate <= 1e-7:
            message = (
                f"{rate:g} isn't above 1e-07, where lr_scheduler_type polynomial ends; raise it, or use "
                "linear"
            )
            yield Problem.at(f"{prefix}training_args.learning_rate", message)
    if role.device_mapping is not None and len(role.device_mapping) % role.model_parallel_size:
        yield Problem.at(
            f"{prefix}device_mapping",
            f"{len(role.device_mapping)} devices don't hold whole copies of the model on tensor × pipeline × "
            f"context parallel {role.model_parallel_size} devices each; use sizes whose product divides "
            f"{len(role.device_mapping)}, or another device_mapping",
        )


def _adapters(path: str, model: ModelArgs) -> Iterator[Problem]:
    """LoRA targets that can't have an adapter. If the model's modules aren't known, only the form of names is
    checked."""
    targets = model.lora_target
    key = f"{path}.lora_target"
    if targets == []:
        yield Problem.at(key, "[] leaves nothing to be trained; name linear modules, or remove it for all")
    elif targets and "all" in targets and len(targets) > 1:
        yield Problem.at(key, f"{', '.join(targets)}: all is every linear module; name it alone")
    for target in targets or ():
        modules = _adaptable_modules(model)
        if not re.fullmatch(r"\w+(\.\w+)*", target):
            yield Problem.at(key, f"{target!r} isn't the name of a module; write a list: [q_proj, v_proj]")
        elif modules and target.rpartition(".")[2] not in (*modules, "all"):
            names = f"{', '.join(modules)}, or all of them (all).{nearest(target, modules)}"
            yield Problem.at(
                key, f"{target!r} isn't a linear module that can get adapters; this model has {names}"
            )


def _adaptable_modules(model: ModelArgs) -> Sequence[str]:
    """The linear modules of a model that can get adapters; empty if they aren't known."""
    shape = model.shape
    if shape and shape.architecture in ("llama", "mistral", "qwen2", "qwen3"):
        return PROJECTIONS
    return ()


def _options(path: str, strategy_args: StrategyArgs, is_active: bool) -> Iterator[Problem]:
    name = strategy_args.strategy_name
    section = f"{path}.strategy_config"
    options = STRATEGIES[name].options
    elsewhere = STRATEGIES[name].set_elsewhere
    for option in strategy_args.strategy_config:
        if option in elsewhere:
            message = (
                f"{name} gets it from the run's other settings (model, dtype, batch, length, …); remove it"
            )
            yield Problem.at(f"{section}.{option}", message)
        if options is not None and option not in options and is_active:
            message = (
                f"{name} has no such option (it has: "
                f"{', '.join(options) or 'none'}).{nearest(option, options)}"
            )
            yield Problem.at(f"{section}.{option}", message)
    if name == "sglang":
        yield from _address(section, strategy_args.strategy_config)


def _fsdp2_options(path: str, role: PlacedModel) -> Iterator[Problem]:
    num_ranks = None if role.device_mapping is None else len(role.device_mapping)
    computes_in = fsdp2_options.DTYPES[role.model_args.dtype]
    for option, sentence in fsdp2_options.problems(
        role.strategy_args.strategy_config, num_ranks, computes_in
    ):
        yield Problem.at(f"{path}.strategy_config.{option}", sentence)


def _megatron_options(path: str, role: PlacedModel) -> Iterator[Problem]:
    options = role.strategy_args.strategy_config
    # Whether the ranks hold whole copies of the model is asked for every strategy.
    problems = list(megatron_options.problems(options, None))
    shape = role.model_args.shape
    if shape is not None and not problems:
        sizes = megatron_options.Shape(
            shape.num_layers,
            shape.num_heads,
            shape.num_kv_heads,
            shape.intermediate_size,
            shape.architecture,
        )
        problems = list(megatron_options.shape_problems(options, sizes))
    for option, sentence in problems:
        key = f"{path}.strategy_config.{option}" if option else f"{path}.strategy_name"
        yield Problem.at(key, sentence)


def _divided_heads(path: str, role: PlacedModel) -> Iterator[Problem]:
    """An engine gives each device of a replica as many heads of attention as the others."""
    size = role.tensor_parallel_size
    shape = role.model_args.shape
    if shape is None:
        return
    is_even = shape.num_kv_heads % size == 0 or size % shape.num_kv_heads == 0
    if shape.num_heads % size or not is_even:
        name = next((name for name in _TENSOR_SIZES if name in role.strategy_args.strategy_config), "tp_size")
        fitting = [str(number) for number in range(1, shape.num_heads + 1) if shape.num_heads % number == 0]
        yield Problem.at(
            f"{path}.strategy_config.{name}",
            f"{size} devices can't share {shape.num_heads} heads and {shape.num_kv_heads} key-value heads "
            f"of {role.model_args.model_name_or_path}; use a number that divides them "
            f"({', '.join(fitting)} divide the heads)",
        )


def _engine_options(path: str, role: PlacedModel) -> Iterator[Problem]:
    yield from _divided_heads(path, role)
    yield from option_problems(path, role)


_OPTION_CHECKS = {
    "fsdp2_train": _fsdp2_options,
    "fsdp2_infer": _fsdp2_options,
    "megatron_train": _megatron_options,
    "megatron_infer": _megatron_options,
    "vllm": _engine_options,
    "sglang": _engine_options,
}
"""What checks the options of a strategy that lists none in its spec, or that depend on the model."""

_TENSOR_SIZES = ("tp_size", "tensor_parallel_size", "tensor_model_parallel_size")
"""Names of the option that says how many devices share a layer."""


def _other_norms(config: AgenticConfig) -> Iterator[Problem]:
    """Published files repeat the run's max_grad_norm among Megatron's options."""
    for name, role in config.active_roles.items():
        norm = role.strategy_args.strategy_config.get("max_grad_norm", config.max_grad_norm)
        if role.strategy_args.spec.divides_layers and norm != config.max_grad_norm:
            yield Problem.at(
                f"{name}.strategy_args.strategy_config.max_grad_norm",
                f"{norm} isn't the run's max_grad_norm {config.max_grad_norm}, which clips the gradients of "
                "every role; set that, and remove this",
            )


def _unlike_sizes(config: AgenticConfig) -> Iterator[Problem]:
    """Megatron divides a process once, for all roles in it."""
    sizes: dict[str, megatron_options.MegatronOptions] = {}
    for name, role in config.active_roles.items():
        options = role.strategy_args.strategy_config
        if not role.strategy_args.spec.divides_layers or any(megatron_options.problems(options, None)):
            continue
        of_role = megatron_options.MegatronOptions.of(options, role.model_parallel_size)
        for other, of_other in sizes.items():
            if of_role.sizes != of_other.sizes:
                yield Problem.at(
                    f"{name}.strategy_args.strategy_config",
                    f"{_sizes_text(of_role)} isn't that of {other}, {_sizes_text(of_other)}, and Megatron "
                    "divides the processes once, for all roles; give both the same sizes, or another "
                    "strategy to one of them",
                )
                return
        sizes[name] = of_role


def _sizes_text(options: megatron_options.MegatronOptions) -> str:
    sizes = f"tensor {options.tp} × pipeline {options.pp} × virtual {options.vp or 1}"
    return f"{sizes} × context {options.cp}"


def _address(section: str, options: Mapping[str, Any]) -> Iterator[Problem]:
    """Where a server is: a running one by its URL, or a port for a new one."""
    if "url" in options and not re.match(r"https?://[^/\s]", str(options["url"])):
        yield Problem.at(f"{section}.url", f"got {options['url']!r}; it must be like http://localhost:30000")
    others = options.keys() - {"url", OWN_TRANSFER}
    if "url" in options and others:
        names = ", ".join(sorted(others))
        yield Problem.at(f"{section}.url", f"that server has its options already; remove {names}")
    if "port" in options and not _is_port(options["port"]):
        yield Problem.at(
            f"{section}.port", f"got {options['port']!r}; a port is a whole number from 1 to 65,535"
        )


def _is_port(value: object) -> bool:
    return type(value) is int and 0 < value < 2**16


def cache_problems(config: AgenticConfig) -> Iterator[Problem]:
    strategy = config.actor_infer.strategy_args
    shape = config.model_shape()
    if not strategy.spec.limits_cache or shape is None:
        return
    token = shape.kv_bytes_per_token(config.actor_infer.model_args.dtype)
    length = config.sequence_length
    if config.kv_cache_bytes < token * length:
        yield Problem.at(
            "actor_infer.strategy_args.strategy_config.kv_cache_bytes",
            f"{config.kv_cache_bytes:,} can't hold one sequence: {token:,} bytes per token × sequence_length "
            f"{length:,} = {token * length:,}; raise it, or lower sequence_length",
        )
