"""`turnwise eval CONFIG --model DIR`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from turnwise.cli.applied_table import print_applied
from turnwise.config import AgenticConfig, load_config
from turnwise.errors import ConfigError


def run(options: argparse.Namespace) -> int:
    """Plays the config's validation tasks with a saved model and prints success with its interval."""
    config, notes = load_config(options.config, options.overrides, AgenticConfig, strict=options.strict)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    if options.episodes is not None and options.episodes < 1:
        raise ConfigError(f"--episodes is {options.episodes}; it must be at least 1")
    if options.json and not Path(options.json).parent.is_dir():
        raise ConfigError(f"--json {options.json}: there is no folder {Path(options.json).parent}; make it first")
    # torch takes seconds to import; a wrong config has been refused by now.
    from turnwise.pipelines.build import evaluate_model
    from turnwise.pipelines.evaluate import success_table

    evaluation = evaluate_model(config, model_path=options.model, num_episodes=options.episodes, on_start=print_applied)
    rows = [("all", evaluation.overall)]
    if len(evaluation.by_tag) > 1:
        rows += list(evaluation.by_tag.items())
    print(success_table(rows))
    if evaluation.num_failed:
        print(f"{evaluation.num_failed} episodes failed outside the policy and are not counted")
    if options.json:
        Path(options.json).write_text(json.dumps(evaluation.to_json(), indent=2) + "\n", encoding="utf-8")
    return 0
