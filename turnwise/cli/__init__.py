"""The command line: `turnwise VERB`."""

import os
import signal
import sys


def _end_early(*_: object) -> None:
    """Ends the process at Ctrl-C while `turnwise.cli.main` is imported. A KeyboardInterrupt would print a
    traceback."""
    os.write(2, b"interrupted\n")
    os._exit(130)


if os.path.basename(sys.argv[0]) in (
    "turnwise",
    "-m",
):  # only in the command itself, not in a program that imports it
    signal.signal(signal.SIGINT, _end_early)
