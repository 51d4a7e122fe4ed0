"""What is wrong with the models of a config, as far as that is known without loading one."""

from __future__ import annotations

from collections.abc import Iterator

from turnwise.config.problems import Problem
from turnwise.config.schema import AgenticConfig
from turnwise.config.sft import SFTConfig
from turnwise.errors import ModelError
from turnwise.model_folder import check_model


def model_problems(config: AgenticConfig | SFTConfig) -> Iterator[Problem]:
    """Folders that can't be loaded or can't hold a sequence. One that isn't here may still be made, or downloaded."""
    if isinstance(config, SFTConfig):
        roles = {"": config.model_args}
    else:
        roles = {f"{name}.": role.model_args for name, role in config.active_roles.items()}
    for prefix, model in roles.items():
        name = model.model_name_or_path
        try:
            check_model(name, model.trust)
        except ModelError as error:
            yield Problem.at("pretrain" if name == config.pretrain else f"{prefix}model_args.model_name_or_path", str(error))
    facts = config.model_facts()
    if facts and config.sequence_length > facts.context_length:
        path = next(iter(roles.values())).model_name_or_path
        yield Problem.at(
            "sequence_length",
            f"{config.sequence_length} tokens are {config.sequence_length - facts.context_length} more than the "
            f"{facts.context_length} that {path} can hold by its config.json",
        )
