"""`turnwise serve MODEL [KEY=VALUE ...]`: a model behind the protocols of the gateway, without training."""

import argparse
import secrets
import socket
from pathlib import Path
from typing import Any

from turnwise.cli.options import print_notes
from turnwise.config import AgenticConfig, parse_config, require, unavailable_to_play
from turnwise.config.read.yaml_text import load_yaml
from turnwise.config.schema.gateway import url_of_clients
from turnwise.config.schema.model_shape import read_model_shape
from turnwise.errors import ConfigError
from turnwise.examine.examined import examine
from turnwise.lifecycle.interrupt import ends_at_once

_EVERY_ADDRESS = ("0.0.0.0", "::")
_MAX_CONTEXT = 4096
"""Tokens of a context, if neither `sequence_length` nor the model says less."""
_SETTINGS = (
    "sequence_length",
    "seed",
    "template_kwargs",
    "actor_infer",
    "actor_train.model_args",
    "agent.tool_parser",
    "deadlines",
    "cluster",
    "num_gpus_per_node",
    "gateway.match",
    "gateway.strict",
    "gateway.max_body_mb",
)
"""The settings that change how a model is served."""
_NOTHING_PLAYED = {"served": {"env_type": "frozen_lake"}}
"""A config needs something to play."""


def run(options: argparse.Namespace) -> int:
    """Serves a model until Ctrl-C, with a line a request."""
    _check_address(options)
    config, notes = parse_config(_values(options))
    keys = [text.partition("=")[0] for text in options.overrides]
    # Other notes are about training.
    print_notes(note for note in notes if any(key in note for key in keys))
    require(unavailable_to_play(config, "train"))
    # torch takes seconds to import; a wrong command line has been refused by now.
    with ends_at_once():
        from turnwise.assemble.serving import ServeOptions, serve_model
        from turnwise.gateway.server import GatewaySettings, aiohttp_web
    aiohttp_web()  # before the model is loaded, too
    key = options.api_key or secrets.token_hex(16)
    name = Path(options.model).name

    def begin(url: str) -> None:
        print(f"serving {name} on {url}/v1, contexts of {config.sequence_length:,} tokens", flush=True)
        if options.api_key is None:
            print(f"the key of this server is {key}", flush=True)

    def show(line: str) -> None:
        print(line, flush=True)

    max_body_bytes = config.gateway.max_body_mb * 2**20
    settings = GatewaySettings(options.host, options.port, options.public_url, max_body_bytes)
    serve_model(examine(config), ServeOptions(name, key, settings, show), begin)
    return 0


def _check_address(options: argparse.Namespace) -> None:
    """Raises ConfigError if nothing can listen at the address."""
    host = options.host
    if options.public_url is not None:
        try:
            url_of_clients(options.public_url)
        except ValueError as fault:
            raise ConfigError(f"--public-url: {fault}") from fault
    if host in _EVERY_ADDRESS and options.public_url is None:
        raise ConfigError(
            f"--host {host} listens on every address of this machine: say with --public-url by which address "
            "clients reach it, as in --public-url http://myhost:8000"
        )
    try:
        # Only to find out, before the model is loaded; a port that is taken meanwhile is reported later.
        socket.create_server((host, options.port), family=_family(host)).close()
    except (OSError, OverflowError) as fault:
        raise ConfigError(
            f"--host {host} --port {options.port} can't be listened on: {fault}; end what uses the port, or "
            "choose another --port"
        ) from fault


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _values(options: argparse.Namespace) -> dict[str, Any]:
    """The config's values: the model's, and those of KEY=VALUE."""
    values: dict[str, Any] = {"pretrain": options.model, "custom_envs": _NOTHING_PLAYED}
    shape = read_model_shape(options.model)
    if shape is not None:
        values["sequence_length"] = min(_MAX_CONTEXT, shape.context_length)
    for text in options.overrides:
        key, separator, value = text.partition("=")
        if not separator or not key:
            raise ConfigError(f"got {text!r}; a setting is KEY=VALUE, like sequence_length=8192")
        _check_setting(key)
        section = values
        *outer, last = key.split(".")
        for name in outer:
            section = section.setdefault(name, {})
            if not isinstance(section, dict):
                raise ConfigError(f"got {text!r}, and {name} has no keys: another setting is its value")
        section[last] = load_yaml(value, f"{text[:60]!r}")
    return values


def _check_setting(key: str) -> None:
    """Raises ConfigError for a setting that changes nothing here. Unknown ones are left to the config."""
    is_known = key.partition(".")[0] in AgenticConfig.model_fields
    if is_known and not any(f"{key}.".startswith(f"{allowed}.") for allowed in _SETTINGS):
        raise ConfigError(f"{key} changes nothing in a served model; these do: {', '.join(_SETTINGS)}")
