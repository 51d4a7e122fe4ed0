"""Finds the environment that a command names: a name or class with arguments, or a tag of a config."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.config import AgenticConfig, load_config, parse_config
from turnwise.config.read.compose import compose
from turnwise.config.read.yaml_text import load_yaml
from turnwise.config.schema.environments import CustomEnv
from turnwise.errors import ConfigError, nearest
from turnwise.runtime.jsonl import not_utf8
from turnwise.spec import ROWS_TAG

NO_MODEL = "none"
"""The value of `pretrain` if neither the config nor the command names a model."""


@dataclass(frozen=True, slots=True)
class EnvTarget:
    """A tag of a config: an environment, or rows. Without a config file, the config has only this tag and
    default settings."""

    config: AgenticConfig
    tag: str
    file: Path | None
    """File of the config; None if the command named only an environment."""

    @property
    def env(self) -> CustomEnv:
        return self.config.custom_envs[self.tag]


def read_target(
    options: argparse.Namespace,
    config_file: str | None = None,
    model: str = NO_MODEL,
    takes_rows: bool = False,
) -> EnvTarget:
    """The environment that a command line names; with `takes_rows` also a config's rows, under the tag
    `ROWS_TAG`. If ENV ends in .yaml, it is the config file, and KEY=VALUE sets any of its keys. Otherwise ENV
    is an env_type or the URL of an OpenEnv server, and KEY=VALUE sets an argument of the environment; with
    `config_file`, it overrides or extends the arguments that the file gives. `model` is used if the config
    names no model."""
    word = options.env
    arguments = options.overrides
    keys: list[str] = []
    if word is not None and "=" in word and ":" not in word.partition("=")[0]:
        arguments = [word, *arguments]
        word = None
    if word is not None and Path(word).suffix in (".yaml", ".yml"):
        if config_file is not None:
            raise ConfigError(f"got two configs, {word} and --config {config_file}; name one")
        config_file = word
        keys = arguments
        word = None
        arguments = []
    if config_file is not None:
        file = Path(config_file)
        if "pretrain" not in compose(file, keys).values:
            keys = [*keys, f"pretrain={model}"]  # an environment needs no model
        return _of_config(options, file, keys, word, arguments, takes_rows)
    if word is None:
        raise ConfigError(
            "which environment? Name an env_type (frozen_lake), a class (module:Class), the URL of an "
            "OpenEnv server, or a config (.yaml)"
        )
    if options.tag is not None:
        raise ConfigError(
            f"--tag {options.tag} names an environment of a config: give the config too (--config FILE)"
        )
    tag = word.rpartition(":")[2] or word
    env: dict[str, Any] = {"env_type": word, "env_config": parse_arguments(arguments)}
    if word.startswith(("http://", "https://")):
        tag = "openenv"
        env = {"env_type": tag, "env_config": {"url": word, **parse_arguments(arguments)}}
    if options.max_steps is not None:
        env["max_steps"] = options.max_steps
    config, _ = parse_config({"pretrain": model, "custom_envs": {tag: env}})
    return EnvTarget(config, tag, None)


def parse_arguments(overrides: Sequence[str]) -> dict[str, Any]:
    """Parses arguments KEY=VALUE; the values are YAML. Raises ConfigError if one has another form.

    >>> parse_arguments(["size=8", "map_rows=[SF,HG]"])
    {'size': 8, 'map_rows': ['SF', 'HG']}
    """
    values = {}
    for text in overrides:
        key, separator, value = text.partition("=")
        if not (separator and key.isidentifier()):
            raise ConfigError(f"got {text!r}; an argument of the environment is KEY=VALUE, like size=8")
        values[key] = load_yaml(value, f"{text[:60]!r}")
    return values


def read_actions(options: argparse.Namespace) -> tuple[str, ...]:
    """The actions of `--actions` or `--actions-file`; () for neither. Raises ConfigError for both, or if no
    action is found."""
    text = options.actions
    file = options.actions_file
    if text is None and file is None:
        return ()
    if text is not None and file is not None:
        raise ConfigError(f"got --actions {text} and --actions-file {file}; give one of them")
    if text is not None:
        words = text.split(",")
        fault = f"--actions is {text!r}"
    else:
        words = _lines_of_actions(file)
        fault = f"--actions-file {file} is empty"
    actions = tuple(word.strip() for word in words if word.strip())
    if not actions:
        raise ConfigError(f"{fault}; name at least one action, as in --actions up,down, or remove it")
    return actions


def _lines_of_actions(file: str) -> list[str]:
    try:
        return Path(file).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as fault:
        raise ConfigError(f"--actions-file {file}{not_utf8(fault)}; write one action per line") from fault
    except OSError as fault:
        raise ConfigError(
            f"--actions-file {file} can't be read ({fault.strerror}); it holds one action per line"
        ) from fault


def _of_config(
    options: argparse.Namespace,
    file: Path,
    overrides: list[str],
    env_type: str | None,
    arguments: Sequence[str],
    takes_rows: bool,
) -> EnvTarget:
    tag = options.tag
    max_steps = options.max_steps
    config, _ = load_config(file, overrides, AgenticConfig, purpose="play")
    names_rows = tag == ROWS_TAG or (tag is None and not config.custom_envs)
    if takes_rows and names_rows and config.data.train_files:
        if max_steps is not None:
            raise ConfigError(
                "--max-steps bounds an environment's actions; agent.max_assistant_turns bounds a row's "
                "responses"
            )
        return EnvTarget(config, ROWS_TAG, file)
    tag = _choose_tag(config, file, env_type, tag)
    type_of_tag = config.custom_envs[tag].env_type
    if env_type not in (None, type_of_tag):
        raise ConfigError(
            f"custom_envs.{tag} of {file} is a {type_of_tag}, not a {env_type}; name one of them, or another "
            "--tag"
        )
    changes: dict[str, Any] = {}
    env_config = parse_arguments(arguments)
    if env_config:
        changes["env_config"] = env_config
    if max_steps is not None:
        changes["max_steps"] = max_steps
        changes["max_actions_per_traj"] = None
    if changes:
        # Merged into the file's values, so that they are checked like these.
        values = {"custom_envs": {tag: changes}}
        config, _ = load_config(file, overrides, AgenticConfig, purpose="play", values=values)
    return EnvTarget(config, tag, file)


def _choose_tag(config: AgenticConfig, file: Path, env_type: str | None, tag: str | None) -> str:
    tags = list(config.custom_envs)
    if tag is not None:
        if tag not in tags:
            listed = ", ".join(tags) or "none"
            raise ConfigError(
                f"{file} has no environment {tag!r}; its tags are {listed}.{nearest(tag, tags)}"
            )
        return tag
    if not tags:
        raise ConfigError(
            f"{file} has no custom_envs: its tasks are rows of data, and this command needs an environment"
        )
    fitting = [name for name in tags if env_type in (None, config.custom_envs[name].env_type)]
    if len(fitting) != 1:
        of_type = f" of type {env_type}" if env_type else ""
        raise ConfigError(
            f"{file} has {len(fitting)} environments{of_type}; choose with --tag, of {', '.join(tags)}"
        )
    return fitting[0]
