"""The common frame of all commands: checks of options, open streams, and readers that have left."""

from __future__ import annotations

import argparse
import errno
import io
import math
import os
import select
import sys

from turnwise.errors import ConfigError

EXIT_NO_READER = 141
"""Exit status as after SIGPIPE: the reader of the output, such as `head`, has left."""
MAX_NUMBER = 10**9
ANSWERED_WHEN_EMPTY = ("config", "env", "overrides", "runs", "set", "actions")
"""An empty word here is answered by whoever reads it. Elsewhere it would read like an option that is left out."""
MENDABLE = {
    errno.ENOSPC: "free some space, then go on with resume_from_checkpoint=true",
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "allow it, or name another place"),
    **dict.fromkeys((errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP), "name another place"),
}
"""Advice if the system refuses a file."""


def check_options(options: argparse.Namespace) -> None:
    given = vars(options)
    if "config" in given and not {"env", "replay"} & given.keys() and options.config is None:
        raise ConfigError(f"{options.verb} needs a config: turnwise {options.verb} FILE [KEY=VALUE ...]")
    for name, value in given.items():
        option = f"--{name.replace('_', '-')}"
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and not text.isascii() and text.encode(errors="replace").decode() != text:
                raise ConfigError(f"{text!r} on the command line isn't UTF-8; write it anew")
            if text == "" and name not in ANSWERED_WHEN_EMPTY:
                raise ConfigError(f"{option} is empty; give it a value, or leave it out")
        if isinstance(value, bool) or not isinstance(value, int | float) or name == "error_rate":
            continue
        least = 0 if name == "seed" else 1 if isinstance(value, int) else math.ulp(0.0)
        if not least <= value <= MAX_NUMBER:
            allowed = "more than 0" if 0 < least < 1 else f"at least {least}"
            raise ConfigError(f"{option} is {value}; it must be {allowed}, and at most {MAX_NUMBER:,}")


def open_standard_streams(is_command: bool) -> None:
    """Opens standard streams that the shell has closed (`>&-`), whose numbers the next files would get. Characters that can't
    be encoded are escaped. A Python limited to ASCII (`LC_ALL=C PYTHONUTF8=0`) couldn't open other file names, so it is
    restarted in UTF-8.
    """
    if is_command and sys.getfilesystemencoding() == "ascii" and "utf8" not in sys._xoptions:
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    for name in ("stdin", "stdout", "stderr"):
        if vars(sys)[name] is None:
            vars(sys)[name] = os.fdopen(os.open(os.devnull, os.O_RDWR), "r" if name == "stdin" else "w")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def has_lost_reader() -> bool:
    """Whether nobody reads standard output any more; if so, discards the rest."""
    look = select.poll()
    look.register(sys.stdout.fileno(), 0)
    is_lost = any(event & (select.POLLERR | select.POLLHUP) for _, event in look.poll(0))
    if is_lost:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return is_lost
