"""`python -m script_file PATH WORDS` is `python PATH WORDS` where a process is forked, which runs modules
only."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
