"""Compiles the C kernels when they are first needed, with the compiler that the machine has, and keeps the result.

A second is what it takes. Without a compiler, or where `TURNWISE_KERNELS=off` is set, there are none, and torch's operations
do the same work in more passes.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
SWITCH = "TURNWISE_KERNELS"
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
_TIME_LIMIT_S = 60.0


@lru_cache(maxsize=1)
def load_kernels() -> ctypes.CDLL | None:
    """The compiled kernels, or None where there are none; why is logged once."""
    if os.environ.get(SWITCH, "on") == "off":
        return None
    compiler = find_compiler()
    if compiler is None:
        logger.warning(
            "Running on torch's kernels, which are slower: there is no C compiler (cc, gcc, clang or $CC). Install one, or set "
            "%s=off to say that this is fine.",
            SWITCH,
        )
        return None
    try:
        return _typed(ctypes.CDLL(str(compiled(FOLDER, compiler, cache_folder()))))
    except (OSError, subprocess.SubprocessError) as error:
        said = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
        logger.warning("Running on torch's kernels, which are slower; compiling the library's own failed: %s", said)
        return None


def find_compiler() -> list[str] | None:
    """The command of a C compiler: `$CC`, or the first of cc, gcc and clang."""
    named = shlex.split(os.environ.get("CC", ""))
    for command in (named, ["cc"], ["gcc"], ["clang"]):
        if command and shutil.which(command[0]):
            return command
    return None


def cache_folder() -> Path:
    """Where compiled kernels are kept: `$XDG_CACHE_HOME/turnwise`, by default in `~/.cache`; where that can't be written, a
    folder of this process's own."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "turnwise"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):
        pass
    return Path(tempfile.mkdtemp(prefix="turnwise-"))


def compiled(sources: Path, compiler: list[str], folder: Path) -> Path:
    """The shared library of the C files in `sources`, compiled unless this processor's is in `folder` already.

    Raises:
        OSError: the folder can't be written.
        subprocess.SubprocessError: the compiler refused, or took more than a minute.
    """
    command = [*compiler, *_FLAGS]
    texts = [path.read_text(encoding="utf-8") for path in sorted(sources.glob("*.[ch]"))]
    facts = [*texts, " ".join(command), platform.machine(), _processor()]
    target = folder / f"kernels-{hashlib.sha256(chr(0).join(facts).encode()).hexdigest()[:16]}.so"
    if not target.exists():
        # Several processes may come here at once: each replaces the file whole.
        partial = folder / f"{target.name}.{os.getpid()}"
        run = [*command, *map(str, sorted(sources.glob("*.c"))), "-o", str(partial), "-lm"]
        try:
            subprocess.run(run, check=True, capture_output=True, text=True, timeout=_TIME_LIMIT_S)
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)
    return target


def _processor() -> str:
    """What `-march=native` means here: a home may be shared by machines that differ."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _typed(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declares the arguments, in the order of the C files."""
    pointer, number, size = ctypes.c_void_p, ctypes.c_float, ctypes.c_int64
    library.rms_norm.argtypes = [pointer, pointer, number, pointer, *[size] * 3]
    library.silu_mul.argtypes = [pointer, pointer, *[size] * 3]
    library.place_heads.argtypes = [pointer, pointer, number, *[pointer] * 6, *[size] * 6]
    library.attend.argtypes = [*[pointer] * 5, number, pointer, *[size] * 6]
    library.silu_mul_backward.argtypes = [*[pointer] * 3, *[size] * 3]
    library.norm_rotate.argtypes = [pointer, size, pointer, number, *[pointer] * 3, *[size] * 4]
    library.norm_rotate_backward.argtypes = [*[pointer] * 2, size, pointer, number, *[pointer] * 4, *[size] * 4]
    library.attend_branches.argtypes = [*[pointer] * 6, number, *[pointer] * 2, *[size] * 6]
    library.attend_branches_backward.argtypes = [*[pointer] * 9, number, *[pointer] * 5, *[size] * 6]
    for function in (library.attend, library.norm_rotate_backward, library.attend_branches, library.attend_branches_backward):
        function.restype = ctypes.c_int
    for function in (library.rms_norm, library.silu_mul, library.place_heads, library.silu_mul_backward, library.norm_rotate):
        function.restype = None
    return library
