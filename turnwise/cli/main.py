"""`turnwise VERB`: reads the command line, imports only what the verb needs, and prints errors as one message."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module

from turnwise import __version__
from turnwise.cli.command_line import EXIT_NO_READER, MENDABLE, check_options, has_lost_reader, open_standard_streams
from turnwise.cli.guard import guarded
from turnwise.errors import ConfigError, TurnwiseError
from turnwise.package_tables import read_table
from turnwise.pipelines.interrupt import EXIT_INTERRUPTED, ends_at_once, ends_by_signals
from turnwise.runtime.call_board import CALLS
from turnwise.runtime.rank import launched

EXIT_ERROR = 2
_TYPES = {"int": int, "float": float}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb and returns the exit status: 0, 2 for an error that the user can fix, 130 after Ctrl-C or SIGTERM.

    The command itself (no `arguments`) runs under the eyes of a parent process.
    """
    with ends_at_once():
        open_standard_streams(is_command=arguments is None)
        parser = build_parser()
        # Overrides may follow options too, where argparse's own "*" no longer finds them.
        options, rest = parser.parse_known_args(arguments)
        unknown = [word for word in rest if word.startswith("-") or "=" not in word or "overrides" not in options]
        if unknown:
            parser.error(f"unrecognized arguments: {' '.join(unknown)} (settings are KEY=VALUE)")
        if rest:
            options.overrides = [*options.overrides, *rest]
        # A user's own `module:Class` is beside the config or in the working directory, which a console script doesn't search.
        named = [vars(options).get(name) for name in ("config", "env")]
        configs = [os.path.abspath(word) for word in named if isinstance(word, str) and word.endswith((".yaml", ".yml"))]
        sys.path[:0] = list(dict.fromkeys([*map(os.path.dirname, configs), os.getcwd()]))
        return _run(options) if arguments is not None else guarded(partial(_run, options))


def _run(options: argparse.Namespace) -> int:
    def run() -> int:
        check_options(options)
        if launched()[0] > 0:
            return _serve(options)
        module, _, function = options.entry.partition(":")
        with ends_at_once():
            verb: Callable[[argparse.Namespace], int] = vars(import_module(f"turnwise.cli.{module}"))[function]
        return verb(options)

    return exit_status(run)


def _serve(options: argparse.Namespace) -> int:
    """What a launcher's processes do beside the first one."""
    is_tool_train = options.verb == "tool" and options.action == "train"
    if options.verb not in ("train", "sft") and not is_tool_train:
        raise ConfigError(
            "a launcher started this command in several processes, and only train and sft train on them; start it without"
        )
    import_module("turnwise.cluster.launched").serve_launched()
    return 0


def exit_status(run: Callable[[], int | None]) -> int:
    """Runs something and prints the errors that a user can fix as one message, without a traceback."""
    from turnwise.tracking.terminal import warnings_on_terminal  # behind the fork: the parent process stays small

    try:
        with ends_by_signals(), warnings_on_terminal():
            status = run() or 0
            sys.stdout.flush()
            return status
    except TurnwiseError as fault:
        print(f"error: {fault}", file=sys.stderr)
    except OSError as fault:
        if isinstance(fault, BrokenPipeError) and has_lost_reader():
            return EXIT_NO_READER
        if fault.errno not in MENDABLE:
            raise
        print(f"error: {fault}; {MENDABLE[fault.errno]}", file=sys.stderr)
    except KeyboardInterrupt:
        CALLS.finish(EXIT_INTERRUPTED)  # another Ctrl-C has nothing to say
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    return EXIT_ERROR


def build_parser() -> argparse.ArgumentParser:
    """The parser of all verbs, as `verbs.yaml` describes them; it imports none of them."""
    parser = argparse.ArgumentParser(prog="turnwise", description="Reinforcement learning of language-model agents.")
    parser.add_argument("--version", action="version", version=f"turnwise {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for name, described in read_table(__file__, "verbs.yaml")["verbs"].items():
        verb = verbs.add_parser(name, help=described["help"], description=described["help"])
        verb.set_defaults(entry=described["entry"], verb=name)
        for flags, settings in described["arguments"].items():
            if "type" in settings:
                settings = settings | {"type": _TYPES[settings["type"]]}
            verb.add_argument(*flags.split(), **settings)
    return parser


if __name__ == "__main__":
    sys.exit(main())
