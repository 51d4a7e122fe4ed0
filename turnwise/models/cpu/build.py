"""Compiles the C kernels when they are first needed, with the machine's own compiler, and keeps the result.
Compiling takes a second. Without a compiler, or with `TURNWISE_KERNELS=off`, torch does the same work in more
passes."""

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from threading import Lock

import torch  # noqa: F401  # imported before the kernels, so that they use its OpenMP and share its threads

from turnwise.errors import ConfigError

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
SWITCH = "TURNWISE_KERNELS"
LANES = 8
"""Number of float32 values that the kernels handle at once. Head sizes and capacities of KV caches must be
multiples of it."""
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
_TIME_LIMIT_S = 60.0
_LOCK = Lock()


def load_kernels() -> ctypes.CDLL | None:
    """The compiled kernels; None if they are off, on Windows, or if they can't be compiled, which a warning
    explains. Raises ConfigError unless `TURNWISE_KERNELS` is on or off."""
    with _LOCK:
        return _load()


@lru_cache(maxsize=1)
def _load() -> ctypes.CDLL | None:
    switch = os.environ.get(SWITCH, "on")
    if switch not in ("on", "off"):
        raise ConfigError(f"the environment variable {SWITCH} is {switch!r}; it may be on or off")
    if switch == "off" or os.name != "posix":
        return None
    faults = []
    advice = "Install gcc or clang"
    for compiler in _compilers():
        try:
            return _typed(_compiled_and_loaded(compiler))
        except subprocess.CalledProcessError as error:
            faults.append(f"{shlex.join(compiler)}: {error.stderr.strip()}")
        except ImportError as error:
            faults.append(f"{shlex.join(compiler)}: {error}")
            advice = (
                "Set XDG_CACHE_HOME or TMPDIR to a folder where programs may run (on a file system "
                "without noexec)"
            )
        except (OSError, subprocess.SubprocessError, AttributeError) as error:
            faults.append(f"{shlex.join(compiler)}: {error}")
    reason = "; ".join(faults) or "there is no C compiler (cc, gcc, clang or $CC)"
    logger.warning(
        "Running on torch's kernels, which are slower: %s. %s, or set %s=off to silence this.",
        reason,
        advice,
        SWITCH,
    )
    return None


def _compilers() -> Iterator[list[str]]:
    """Commands of C compilers: `$CC` alone if it is set, else those of cc, gcc and clang that exist."""
    try:
        from_environment = shlex.split(os.environ.get("CC", ""))
    except ValueError:
        from_environment = [os.environ["CC"]]
    if from_environment:
        yield from_environment
        return
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            yield [name]


def _compiled_and_loaded(compiler: list[str]) -> ctypes.CDLL:
    folder = cache_folder()
    for _ in range(2 if folder else 0):
        assert folder is not None
        library = None
        try:
            library = compiled(FOLDER, compiler, folder)
            return _loaded(library)
        except (OSError, ImportError):
            # A crash has cut the file, another system shares this home, the folder is full, or nothing in it
            # may run.
            if library is not None:
                library.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="turnwise-") as temporary:
        # The library stays loaded when its file is removed.
        return _loaded(compiled(FOLDER, compiler, Path(temporary)))


def _loaded(library: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise ImportError(f"what it compiled can't be loaded: {error}") from error


def cache_folder() -> Path | None:
    """The folder of compiled kernels, `$XDG_CACHE_HOME/turnwise` or `~/.cache/turnwise`. None if it can't be
    written, or other users can write or replace it."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "turnwise"
        folder.mkdir(parents=True, exist_ok=True, mode=0o755)
        # Links are followed, since whoever can write the folder of a link can point it elsewhere.
        parents = {
            parent for place in {Path(os.path.abspath(folder)), folder.resolve()} for parent in place.parents
        }
        is_own = folder.stat().st_uid == os.getuid() and not _is_open(folder)
        foreign = [
            parent
            for parent in sorted(parents)
            if _is_open(parent) or parent.stat().st_uid not in (0, os.getuid())
        ]
    except (OSError, RuntimeError):
        return None
    if foreign:
        logger.warning(
            "Kernels are compiled again at each start: others can write to %s, above their cache %s. chmod "
            "go-w it, or set XDG_CACHE_HOME to a folder that is yours alone.",
            foreign[-1],
            folder,
        )
    return folder if is_own and not foreign and os.access(folder, os.W_OK) else None


def _is_open(folder: Path) -> bool:
    """Whether other users can replace files in the folder. In a sticky folder like /tmp they can replace only
    their own."""
    mode = folder.stat().st_mode
    return bool(mode & (stat.S_IWGRP | stat.S_IWOTH)) and not mode & stat.S_ISVTX


def compiled(sources: Path, compiler: list[str], folder: Path) -> Path:
    """The path of the shared library of the C files in `sources`. Compiles it into `folder` unless it is
    there already. Raises OSError if the folder can't be written or there is no compiler; SubprocessError if
    compiling fails or exceeds a minute."""
    files = sorted(sources.glob("*.[ch]"))
    texts = [path.read_text(encoding="utf-8") for path in files]
    inputs = [*texts, " ".join(_FLAGS), *_machine(), _run([*compiler, "--version"])]
    target = folder / f"kernels-{hashlib.sha256(chr(0).join(inputs).encode()).hexdigest()[:16]}.so"
    if not target.exists():
        # Several processes, also on several machines, may compile at once: each replaces the whole file.
        descriptor, partial = tempfile.mkstemp(dir=folder, suffix=".partial")
        os.close(descriptor)
        try:
            _run(
                [
                    *compiler,
                    *_FLAGS,
                    *(str(path) for path in files if path.suffix == ".c"),
                    "-o",
                    partial,
                    "-lm",
                ]
            )
            os.chmod(partial, 0o755)
            os.replace(partial, target)
        finally:
            Path(partial).unlink(missing_ok=True)
    return target


def _run(command: list[str]) -> str:
    """The output of a command, in English."""
    environment = {**os.environ, "LC_ALL": "C"}
    result = subprocess.run(
        command,
        check=True,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_TIME_LIMIT_S,
        env=environment,
    )
    return result.stdout


def _machine() -> list[str]:
    """Identifies this machine's CPU and C library, since machines with different ones may share a home
    folder."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return [platform.machine(), flags, *platform.libc_ver()]


def _typed(library: ctypes.CDLL) -> ctypes.CDLL:
    """The library with the types of its functions' arguments and results declared; ctypes takes results as
    int by default."""
    pointer, number, size = ctypes.c_void_p, ctypes.c_float, ctypes.c_int64
    library.rms_norm.argtypes = [pointer, pointer, number, pointer, *[size] * 3]
    library.silu_mul.argtypes = [pointer, pointer, *[size] * 3]
    library.silu_mul_backward.argtypes = [*[pointer] * 3, *[size] * 3]
    library.norm_rotate.argtypes = [pointer, size, pointer, number, *[pointer] * 3, *[size] * 4]
    library.norm_rotate_backward.argtypes = [
        *[pointer] * 2,
        size,
        pointer,
        number,
        *[pointer] * 4,
        *[size] * 4,
    ]
    library.attend_branches.argtypes = [*[pointer] * 6, number, *[pointer] * 2, *[size] * 6]
    library.attend_branches_backward.argtypes = [*[pointer] * 9, number, *[pointer] * 5, *[size] * 6]
    library.draw.argtypes = [*[pointer] * 5, *[size] * 3]
    library.workspace_size.argtypes = [pointer, size, size]
    library.workspace_size.restype = size
    library.forward.argtypes = [*[pointer] * 4, size]
    for function in (
        library.rms_norm,
        library.silu_mul,
        library.silu_mul_backward,
        library.norm_rotate,
        library.forward,
    ):
        function.restype = None
    return library
