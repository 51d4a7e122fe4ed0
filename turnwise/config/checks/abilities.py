"""Refuses a strategy that can't do what its role asks of it (`StrategySpec.lacks`). Streamed parts are left
to `resolve.streaming_obstacles`, since a run does without them unless it is told to stream."""

from collections.abc import Iterator

from turnwise.config.problems import Problem
from turnwise.config.schema.agentic import AgenticConfig
from turnwise.config.schema.model_args import ModelArgs, PlacedModel
from turnwise.config.schema.sft import SFTConfig
from turnwise.spec import STRATEGIES, Ability


def lacking_abilities(config: AgenticConfig | SFTConfig) -> Iterator[Problem]:
    """A problem for each ability that a role asks for and its strategy lacks. It names the strategies that
    have it."""
    if isinstance(config, SFTConfig):
        yield from _lacking("", config, _of_model(config.model_args, is_trained=True))
        return
    for name, role in config.active_roles.items():
        yield from _lacking(f"{name}.", role, _of_role(config, name))


def _of_role(config: AgenticConfig, name: str) -> dict[Ability, str]:
    """The abilities that a role asks for → the key that asks for each."""
    role = config.roles[name]
    if role.strategy_args.spec.kind == "sampling":
        return {}
    abilities = _of_model(role.model_args, is_trained=role.strategy_args.spec.kind == "train")
    if name == "critic":
        abilities["critic"] = "adv_estimator"
    if name in ("actor_train", "reference") and config.needs_kept_ids:
        abilities["kept_ids"] = "actor_infer.generating_args.top_k"
    return abilities


def _of_model(arguments: ModelArgs, is_trained: bool) -> dict[Ability, str]:
    abilities: dict[Ability, str] = {arguments.dtype: "model_args.dtype"}
    if is_trained and arguments.has_adapter:
        abilities["lora"] = "model_args.lora_rank"
    if is_trained and not arguments.disable_gradient_checkpointing:
        abilities["gradient_checkpointing"] = "model_args.disable_gradient_checkpointing"
    return abilities


def _lacking(prefix: str, role: PlacedModel, abilities: dict[Ability, str]) -> Iterator[Problem]:
    spec = role.strategy_args.spec
    for ability, key in abilities.items():
        if ability in spec.lacks:
            capable = [
                name
                for name, other in STRATEGIES.items()
                if other.kind == spec.kind and ability not in other.lacks
            ]
            message = (
                f"{role.strategy_args.strategy_name} can't do this: {spec.lacks[ability]}; use "
                f"{' or '.join(capable)}"
            )
            yield Problem.at(f"{prefix}{key}" if key.startswith("model_args") else key, message)
