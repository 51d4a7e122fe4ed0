"""Finds faults in a config's models, as far as they show without loading one."""

from __future__ import annotations

import re
from collections.abc import Iterator

from turnwise.config.model_shape import PROJECTIONS, read_model_shape
from turnwise.config.problems import Problem
from turnwise.config.roles import ModelArgs
from turnwise.config.schema import AgenticConfig
from turnwise.config.sft import SFTConfig
from turnwise.errors import ModelError, nearest
from turnwise.model_folder import check_model


def named_models(config: AgenticConfig | SFTConfig) -> Iterator[tuple[str, ModelArgs]]:
    """The models of a run, each with the key that names it; actor_infer's is actor_train's."""
    if isinstance(config, SFTConfig):
        roles = {"": config.model_args}
    else:
        roles = {f"{name}.": role.model_args for name, role in config.active_roles.items() if name != "actor_infer"}
    for prefix, model in roles.items():
        is_shared = model.model_name_or_path == config.pretrain
        yield "pretrain" if is_shared else f"{prefix}model_args.model_name_or_path", model


def model_problems(config: AgenticConfig | SFTConfig) -> Iterator[Problem]:
    """Folders that can't be loaded or can't hold a sequence. One that isn't here may still be made, or downloaded."""
    models = list(named_models(config))
    for key, model in models:
        try:
            check_model(model.model_name_or_path, model.trust)
        except ModelError as error:
            yield Problem.at(key, str(error))
    shape = config.model_shape()
    if shape and config.sequence_length > shape.context_length:
        path = models[0][1].model_name_or_path
        yield Problem.at(
            "sequence_length",
            f"{config.sequence_length} tokens are {config.sequence_length - shape.context_length} more than the "
            f"{shape.context_length} that {path} can hold by its config.json",
        )


def adapter_problems(path: str, model: ModelArgs) -> Iterator[Problem]:
    """Targets that can't have an adapter; for an unknown model, targets that name no module of any known model."""
    targets = model.lora_target
    if targets == []:
        yield Problem.at(f"{path}.lora_target", "[] leaves nothing to be trained; name linear modules, or leave it out for all")
    elif targets and "all" in targets and len(targets) > 1:
        yield Problem.at(f"{path}.lora_target", f"{', '.join(targets)}: all is every linear module; name it alone")
    for target in targets or ():
        shape = read_model_shape(model.model_name_or_path)
        known = PROJECTIONS if shape and shape.architecture in ("llama", "mistral", "qwen2", "qwen3") else ()
        if not re.fullmatch(r"\w+(\.\w+)*", target):
            yield Problem.at(f"{path}.lora_target", f"{target!r} is no name of a module; write a list such as [q_proj, v_proj]")
        elif known and target.rpartition(".")[2] not in (*known, "all"):
            message = f"{target!r} is no linear module that can get adapters; this model has {', '.join(known)}, or all of them"
            yield Problem.at(f"{path}.lora_target", f"{message} (all).{nearest(target, known)}")
