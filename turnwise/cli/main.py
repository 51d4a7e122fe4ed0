"""`turnwise VERB`: reads the command line, imports only what the verb needs, and prints errors as one
message."""

import argparse
import gc
import io
import math
import os
import select
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from turnwise import __version__
from turnwise.cli.guard import guarded
from turnwise.cli.verbs import VERBS
from turnwise.errors import ConfigError, TurnwiseError, nearest
from turnwise.lifecycle.interrupt import EXIT_INTERRUPTED, ends_at_once, ends_by_signals
from turnwise.runtime.call_board import CALLS
from turnwise.runtime.disk import NO_SPACE, file_error
from turnwise.runtime.rank import launched

EXIT_NO_READER = 141
"""Exit status if the program that reads the output, such as `head`, has ended: the one that a shell reports
for SIGPIPE."""
MAX_NUMBER = 10**9
MAY_BE_ZERO = ("seed", "step", "sibling", "port")
ANSWERED_WHEN_EMPTY = ("config", "env", "overrides", "runs", "set", "actions")
"""Options whose commands check by themselves whether the value is "". `check_options` refuses "" for all
other options."""


def check_verb(words: Sequence[str]) -> None:
    """Ends the process like argparse, but with a suggestion, if the first word is no verb and resembles
    one."""
    if not words:
        return
    word = words[0]
    if word.startswith("-") or word in VERBS:
        return
    suggestion = nearest(word, VERBS)
    if suggestion:
        print(f"error: {word!r} is no verb.{suggestion} `turnwise --help` lists them", file=sys.stderr)
        sys.exit(EXIT_ERROR)


def check_options(options: argparse.Namespace) -> None:
    """Raises ConfigError if the config is missing, a value isn't UTF-8 or is empty, or a number is out of
    range."""
    values = vars(options)
    needs_config = "config" in values and "env" not in values and "replay" not in values
    if needs_config and options.config is None:
        raise ConfigError(f"{options.verb} needs a config: turnwise {options.verb} FILE [KEY=VALUE ...]")
    for name, value in values.items():
        option = f"--{name.replace('_', '-')}"
        texts = value if isinstance(value, list) else [value]
        for text in texts:
            if isinstance(text, str) and text.encode(errors="replace").decode() != text:
                raise ConfigError(f"{text!r} on the command line isn't UTF-8; type it again")
            if text == "" and name not in ANSWERED_WHEN_EMPTY:
                raise ConfigError(f"{option} is empty; give it a value, or remove it")
        # --error-rate has a range of its own, which its command checks.
        if isinstance(value, int | float) and not isinstance(value, bool) and name != "error_rate":
            _check_range(name, option, value)


def _check_range(name: str, option: str, value: float) -> None:
    minimum = math.ulp(0.0)
    allowed = "more than 0"
    if isinstance(value, int):
        minimum = 0 if name in MAY_BE_ZERO else 1
        allowed = f"at least {minimum}"
    if not minimum <= value <= MAX_NUMBER:
        raise ConfigError(f"{option} is {value}; it must be {allowed}, and at most {MAX_NUMBER:,}")


def open_standard_streams(is_command: bool) -> None:
    """Opens standard streams that the shell has closed (`>&-`), so that no file opened later gets their
    descriptors. Escapes characters that stdout can't encode. A command whose locale has only ASCII (`LC_ALL=C
    PYTHONUTF8=0`) restarts in UTF-8."""
    if is_command and sys.getfilesystemencoding() == "ascii" and "utf8" not in sys._xoptions:
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    for name in ("stdin", "stdout", "stderr"):
        if vars(sys)[name] is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            mode = "r" if name == "stdin" else "w"
            vars(sys)[name] = os.fdopen(descriptor, mode)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def has_lost_reader() -> bool:
    """Whether nobody reads standard output any more. If so, the rest of the output is discarded."""
    look = select.poll()
    look.register(sys.stdout.fileno(), 0)
    is_lost = any(event & (select.POLLERR | select.POLLHUP) for _, event in look.poll(0))
    if is_lost:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return is_lost


def drops_output() -> bool:
    """Whether standard output can't be written, as on a full disk. If so, what is left of the output is
    discarded: otherwise Python tries once more when it ends, and ends with its own error."""
    try:
        descriptor = sys.stdout.fileno()
        sys.stdout.flush()
        # Python has forgotten a long text that it couldn't write, so a flush alone succeeds.
        os.write(descriptor, b"\n")
    except io.UnsupportedOperation:  # a program that calls `main` has put something else in its place
        return False
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
        return True
    return False


class _Parser(argparse.ArgumentParser):
    """argparse hides that a full disk has taken nothing of its help, and ends with status 0."""

    def _print_message(self, message: str, file: Any = None) -> None:
        if file is not sys.stdout:
            super()._print_message(message, file)
            return
        status = exit_status(lambda: print(message, end="", flush=True))
        if status:
            sys.exit(status)


EXIT_ERROR = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a verb and returns the exit status: 0, 1 for a failed check or tool action, 2 for an error that
    the user can fix, 130 after Ctrl-C or SIGTERM. Without `arguments`, reads those of the process and runs
    the verb in a child (`cli.guard`)."""
    with ends_at_once():
        open_standard_streams(is_command=arguments is None)
        parser = build_parser()
        check_verb(sys.argv[1:] if arguments is None else arguments)
        options = _parse(parser, arguments)
        _extend_import_path(options)
        run = partial(exit_status, partial(_run, options), VERBS[options.verb].continued)
        if arguments is not None:
            return run()
        # Imports make many objects and no garbage. With its defaults the collector takes a sixth of their
        # time.
        gc.set_threshold(50_000)
        return guarded(run)


def _parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    options, extra = parser.parse_known_args(arguments)
    if "LOCAL_RANK" in os.environ:
        # DeepSpeed's launcher adds the rank to the command line.
        extra = [word for word in extra if not word.startswith(("--local_rank=", "--local-rank="))]
    if not extra:
        return options
    # Overrides may also stand behind options, where argparse doesn't assign them to its "*" argument.
    unknown = extra
    if "overrides" in options:
        unknown = [word for word in extra if word.startswith("-") or "=" not in word]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)} (settings are KEY=VALUE)")
    options.overrides = [*options.overrides, *extra]
    return options


def _extend_import_path(options: argparse.Namespace) -> None:
    """Lets Python import a user's `module:Class` from the config's folder or the working directory. A console
    script imports from neither."""
    folders = []
    for name in ("config", "env"):
        word = vars(options).get(name)
        if isinstance(word, str) and word.endswith((".yaml", ".yml")):
            folders.append(os.path.dirname(os.path.abspath(word)))
    folders.append(os.getcwd())
    sys.path[:0] = list(dict.fromkeys(folders))


def _run(options: argparse.Namespace) -> int:
    check_options(options)
    if launched()[0] > 0:
        return _serve(options)
    with ends_at_once():
        command = VERBS[options.verb].load()
    return command(options)


def _serve(options: argparse.Namespace) -> int:
    """Serves calls from rank 0 of a launcher's processes. The other ranks do this instead of running the
    verb."""
    is_tool_train = options.verb == "tool" and options.action == "train"
    if options.verb not in ("train", "sft") and not is_tool_train:
        raise ConfigError(
            "a launcher started several processes, which only train and sft use; start this command "
            "without one"
        )
    from turnwise.cluster.launched import serve_launched  # imports torch

    serve_launched()
    return 0


def exit_status(run: Callable[[], int | None], continued: str | None = None) -> int:
    """Runs a command and returns its exit status. Prints an error that the user can fix as one message,
    without a traceback. `continued` says how what was done before a full disk is continued, None if it begins
    again."""
    # After the fork: the parent process stays small.
    from turnwise.tracking.terminal import warnings_on_terminal

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
        unnamed_file = "a file"
        if fault.errno in NO_SPACE and fault.filename is None and drops_output():
            unnamed_file = "the output of this command"
        sentence = file_error(fault, continued, unnamed_file)
        if sentence is None:
            raise
        print(f"error: {sentence}", file=sys.stderr)
    except KeyboardInterrupt:
        CALLS.finish(EXIT_INTERRUPTED)  # another Ctrl-C needs no message
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    return EXIT_ERROR


def build_parser() -> argparse.ArgumentParser:
    """The parser of all verbs. The verbs' modules aren't imported."""
    parser = _Parser(prog="turnwise", description="Reinforcement learning of language-model agents.")
    parser.add_argument("--version", action="version", version=f"turnwise {__version__}")
    parsers = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for name, verb in VERBS.items():
        verb_parser = parsers.add_parser(name, help=verb.help, description=verb.help)
        verb_parser.set_defaults(verb=name)
        verb.add_arguments(verb_parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
