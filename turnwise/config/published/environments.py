"""Translates the environments of published files."""

from typing import Any

from turnwise.config.problems import Problem
from turnwise.config.published.coming_from import vocabulary
from turnwise.config.published.translation import Translation
from turnwise.spec import ENVS


def translate_env(translation: Translation, path: tuple[str, ...]) -> None:
    """Reads an environment's class of manager, action pattern and `env_config` as ours."""
    env = translation.section(*path)
    manager = env.get("env_manager_cls")
    if isinstance(manager, str):
        translation.is_published = True
        name = manager.rpartition(".")[2]
        managers = vocabulary()["managers"]
        mode, lacking = managers.get(name) or managers[""]
        if lacking:
            translation.problems.append(Problem((*path, "env_manager_cls"), f"{name}: {lacking}"))
            del env["env_manager_cls"]
            if mode:
                env["mode"] = mode
        else:
            translation.move((*path, "env_manager_cls"), (*path, "mode"), mode)
    config = translation.section(*path, "env_config")
    if "action_pattern" in config:
        if "action_pattern" in env:
            del config["action_pattern"]  # the tag's own pattern parses actions
        else:
            translation.move((*path, "env_config", "action_pattern"), (*path, "action_pattern"))
    if str(env.get("env_type")) in ENVS:
        _translate_built_in(translation, path, env, config)


def _answer_env_config(
    translation: Translation, path: tuple[str, ...], env_type: str, config: dict[str, Any]
) -> None:
    """Reads keys that only this environment has elsewhere as ours, or answers them with what to use here."""
    table = vocabulary()["env_config"].get(env_type, {})
    for key, (our_key, values, reason) in table.get("moves", {}).items():
        if key not in config:
            continue
        value = config[key]
        if isinstance(value, str) and value in values:
            translation.move((*path, "env_config", key), (*path, "env_config", our_key), values[value])
        else:
            translation.problems.append(Problem((*path, "env_config", key), f"is {value!r}; {reason}"))
            del config[key]
    for key, (harmless, reason) in table.get("answers", {}).items():
        if key in config and config.pop(key) not in [None, *harmless]:
            translation.problems.append(
                Problem((*path, "env_config", key), f"isn't in this version: {reason}")
            )


def _translate_built_in(
    translation: Translation, path: tuple[str, ...], env: dict[str, Any], config: dict[str, Any]
) -> None:
    """Drops `env_config` keys that the framework decides on. The smaller of `env_config.max_steps` and
    `max_steps` applies."""
    for key, reason in vocabulary()["built_in_env_config"].items():
        if config.pop(key, None) is not None:
            translation.ineffective.append(Problem((*path, "env_config", key), f"has no effect: {reason}"))
    _answer_env_config(translation, path, str(env["env_type"]), config)
    limit = config.get("max_steps")
    if not isinstance(limit, int):
        return
    del config["max_steps"]
    max_steps = env.get("max_steps", limit)
    if isinstance(max_steps, int):
        env["max_steps"] = min(limit, max_steps)
    if max_steps != limit:
        message = f"max_steps is {max_steps} and env_config.max_steps {limit}; the smaller one holds"
        translation.notes.append(f"{'.'.join(path)}: {message}")
