"""`turnwise serve-env CONFIG TAG`: serves an environment of a config in OpenEnv's protocol."""

import argparse
import asyncio
import sys
from pathlib import Path

from turnwise.cli.env_target import NO_MODEL
from turnwise.config import AgenticConfig, load_config
from turnwise.config.read.compose import compose
from turnwise.errors import ConfigError, nearest
from turnwise.examine.envs import env_factory, try_environment
from turnwise.gateway.openenv_server import OpenEnvServer
from turnwise.types import Task


def run(options: argparse.Namespace) -> int:
    """Serves until Ctrl-C."""
    file = Path(options.config)
    overrides = list(options.overrides)
    if "pretrain" not in compose(file, overrides).values:
        overrides.append(f"pretrain={NO_MODEL}")  # an environment needs no model
    config, _ = load_config(file, overrides, AgenticConfig, purpose="play")
    tags = list(config.custom_envs)
    if options.tag not in tags:
        listed = ", ".join(tags) or "none"
        raise ConfigError(
            f"{file} has no environment {options.tag!r}; its tags are {listed}.{nearest(options.tag, tags)}"
        )
    try_environment(config, options.tag, options.split)
    make = env_factory(config, options.tag, options.split)
    task = Task(id=f"{options.split}/{options.tag}", tag=options.tag, split=options.split, seed=0)
    server = OpenEnvServer(
        lambda: make(task),
        options.tag,
        host=options.host,
        port=options.port,
        max_sessions=options.max_sessions,
    )
    try:
        asyncio.run(_serve(server))
    except KeyboardInterrupt:
        print("ended", file=sys.stderr)
    return 0


async def _serve(server: OpenEnvServer) -> None:
    await server.start()
    print(f"serving    {server.url} (OpenEnv 0.10), until Ctrl-C", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        await server.close()
