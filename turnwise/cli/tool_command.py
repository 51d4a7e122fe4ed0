"""`turnwise tool ACTION --parameter value …` and `turnwise pipeline CONFIG` print JSON on stdout, and
progress on stderr."""

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from typing import Any

from turnwise.config.read.yaml_text import load_yaml
from turnwise.errors import ConfigError, TurnwiseError, nearest
from turnwise.rl_tool.parameters import ACTIONS, describe_action
from turnwise.rl_tool.pipeline import AgenticRLPipeline
from turnwise.rl_tool.tool import RLTrainingTool, error_answer

EXIT_REFUSED = 1


def run(options: argparse.Namespace) -> int:
    """Runs an action or the pipeline, and prints its answer as JSON. Returns 1 if the answer is an error,
    else 0."""
    if options.verb == "tool" and {"--help", "-h"} & set(options.parameters):
        return _print_help(options.action)
    with contextlib.redirect_stdout(sys.stderr):
        try:
            if options.verb == "pipeline":
                answer = AgenticRLPipeline(options.config).run()
            else:
                answer = json.loads(
                    RLTrainingTool().run({"action": options.action, **_parameters(options.parameters)})
                )
        except TurnwiseError as error:
            answer = error_answer(error, options.verb)
    print(json.dumps(answer, ensure_ascii=False, indent=2))
    return 0 if answer["status"] == "success" else EXIT_REFUSED


def _print_help(action: str) -> int:
    """Prints the parameters of an action. Raises ConfigError if there is no such action."""
    if action not in ACTIONS:
        raise ConfigError(
            f"{action!r} is no action of the tool; the actions are "
            f"{', '.join(ACTIONS)}.{nearest(action, ACTIONS)}"
        )
    print(describe_action(action))
    return 0


def _parameters(words: Sequence[str]) -> dict[str, Any]:
    """Parses `--name value`, `--name=value`, and `--name` alone, which means true. Values are YAML, so
    `--name=` means null."""
    found: dict[str, Any] = {}
    awaiting = ""  # the parameter whose value the next word may be
    for word in words:
        if word.startswith("--"):
            name, has_value, value = word[2:].partition("=")
            name = name.replace("-", "_")
            found[name], awaiting = (load_yaml(value, word), "") if has_value else (True, name)
        elif awaiting:
            found[awaiting], awaiting = load_yaml(word, f"--{awaiting}"), ""
        else:
            raise ConfigError(
                f"{word!r} belongs to no parameter; write --name value, and a list as --name '[a, b]'"
            )
    return found
