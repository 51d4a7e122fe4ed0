"""The command line: `turnwise VERB`."""

import os
import sys
from types import TracebackType


def _interrupted_early(kind: type[BaseException], fault: BaseException, trace: TracebackType | None) -> None:
    """Says in one line that Ctrl-C came while `turnwise.cli.main` was imported, before it could listen to it."""
    if not issubclass(kind, KeyboardInterrupt):
        return sys.__excepthook__(kind, fault, trace)
    os.write(2, b"interrupted\n")
    os._exit(130)


if os.path.basename(sys.argv[0]) in ("turnwise", "-m"):  # the command, and no program that imports it
    sys.excepthook = _interrupted_early
