"""`turnwise train CONFIG [KEY=VALUE ...]` and `turnwise sft CONFIG [KEY=VALUE ...]`."""

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path

from turnwise.assemble.placement import prepare_run
from turnwise.cli.options import print_notes, read_examined
from turnwise.config import not_here, require, unavailable
from turnwise.config.place import place, smallest_machine
from turnwise.config.read.yaml_text import load_yaml, read_yaml
from turnwise.config.show.dump import RESUMED
from turnwise.errors import ConfigError, DataError
from turnwise.examine.problems import problems
from turnwise.examine.read import load_examined_sft
from turnwise.lifecycle.interrupt import ends_at_once
from turnwise.runtime.machine import ray_sign
from turnwise.runtime.rank import launched


def run(options: argparse.Namespace) -> int:
    """Trains, draws the learning curve, and prints where the results are."""
    repeated_run = Path(options.replay) if options.replay else None
    if repeated_run is not None:
        options.config, options.overrides = _config_of(repeated_run, options)
    if options.config is None:
        raise ConfigError(
            "train needs a config: turnwise train FILE [KEY=VALUE ...], or --replay RUN with the folder of "
            "a run"
        )
    examined = read_examined(options, find=problems)
    config = examined.config
    # Before torch is imported, to refuse at once what can't run here.
    require([*unavailable(config), *not_here(config)])
    rollouts = Path(options.from_rollouts) if options.from_rollouts else None
    if rollouts is not None and not rollouts.is_file():
        raise DataError(
            f"--from-rollouts {rollouts}: there is no such file; `turnwise rollout` and every run write one"
        )
    with ends_at_once():
        if rollouts is None and launched() == (0, 1):
            # Not the placement on this machine: its accelerators are found by torch, which the fork server
            # imports meanwhile.
            machine = replace(smallest_machine(config), ray_sign=ray_sign())
            prepare_run(place(config, machine))
        from turnwise.assemble.agentic import build_agentic
        from turnwise.assemble.whole_run import whole_run

    build = partial(
        build_agentic,
        examined,
        is_quiet=options.quiet,
        rollouts=rollouts,
        is_profiled=options.profile,
        repeated_run=repeated_run,
    )
    with whole_run(config, build, options.quiet, plays=rollouts is None) as pipeline:
        pipeline.run()
    if options.profile:
        print(f"timeline: {pipeline.folder.timeline}")
    return 0


def run_sft(options: argparse.Namespace) -> int:
    """Trains on demonstrations, and prints where the model is."""
    with ends_at_once():
        examined, notes = load_examined_sft(
            options.config,
            options.overrides,
            options.strict,
            problems,
        )
    print_notes(notes)
    with ends_at_once():
        from turnwise.assemble.sft import fine_tune
    fine_tune(examined, is_quiet=options.quiet)
    return 0


def _config_of(run: Path, options: argparse.Namespace) -> tuple[str, list[str]]:
    """The config file of the run to replay, and overrides: another experiment name, so that no run resumes
    from the replay's checkpoints; `resume_from_checkpoint=false`; then those of the command line. Raises
    ConfigError if one of the latter could change results, or there is another config or --from-rollouts;
    DataError if `run` isn't the folder of a run."""
    overrides = [text for text in (options.config, *options.overrides) if text is not None]
    for text in overrides:
        if "=" not in text:
            raise ConfigError(
                f"--replay {run} uses the config of that run, and {text} is another one; remove one of them"
            )
        path = text.partition("=")[0]
        section = path.partition(".")[0]
        free_sections = RESUMED["free_in_replay"]
        if section not in free_sections:
            raise ConfigError(
                f"--replay {run} repeats that run bit by bit, and {section} could change it; remove {text}, "
                f"or train without --replay. A replay may have its own {', '.join(free_sections)}"
            )
    if options.from_rollouts:
        raise ConfigError(
            "--replay plays the tasks of a run again and --from-rollouts plays nothing; remove one of them"
        )
    file = run / "config.yaml"
    if not file.is_file():
        raise DataError(f"--replay {run}: there is no config.yaml in it, so it isn't the folder of a run")
    values = load_yaml(read_yaml(file), str(file))
    if not isinstance(values, dict) or not isinstance(values.get("exp_name"), str):
        raise DataError(
            f"--replay {run}: its config.yaml holds no exp_name, so no run wrote it; restore the run's own"
        )
    name = values["exp_name"].replace("'", "\\'")
    return str(file), [f"exp_name='{name}-replay'", "resume_from_checkpoint=false", *overrides]
