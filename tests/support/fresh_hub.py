"""`turnwise …` with a huggingface_hub that reads its variables now, though the process is forked off one that
has imported it.

`folder NAME…` does what every command does with `--model NAME`, and prints the folders.
"""

from __future__ import annotations

import sys
from functools import partial

from turnwise.cli.main import exit_status, main
from turnwise.model_files.hub import model_folder


def show(name: str) -> None:
    print(model_folder(name))


if __name__ == "__main__":
    for module in [name for name in sys.modules if name.partition(".")[0] == "huggingface_hub"]:
        del sys.modules[module]
    if sys.argv[1] == "folder":
        sys.exit(max([exit_status(partial(show, name)) for name in sys.argv[2:]]))
    sys.exit(main(sys.argv[1:]))
