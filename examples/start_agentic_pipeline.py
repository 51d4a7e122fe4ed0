"""The published launcher: `python examples/start_agentic_pipeline.py --config_path DIR --config_name NAME
[overrides]`.

The same as `turnwise train DIR/NAME.yaml [overrides]`. A relative DIR is taken from the working directory, or
from this folder.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from turnwise.cli.guard import guarded
from turnwise.cli.main import exit_status, main
from turnwise.config.read.compose import find_config


def launch(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Train an agent by reinforcement learning.")
    parser.add_argument("--config_path", default=".", metavar="DIR", help="folder of the config")
    parser.add_argument(
        "--config_name", required=True, metavar="NAME", help="file name of the config, without .yaml"
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="values that replace the file's")
    options = parser.parse_args(arguments)

    def train() -> int:
        path = find_config(options.config_path, options.config_name, Path(__file__).resolve().parent)
        return main(["train", str(path), *options.overrides])

    return exit_status(train)


if __name__ == "__main__":
    sys.exit(guarded(launch))
