"""Environments of other packages, and what turnwise knows about them (`packages.yaml`)."""

import io
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from turnwise.errors import NotAvailableError

_process = threading.Lock()


@cache
def known_of(package: str) -> Any:
    """The section of `packages.yaml` about a package."""
    return yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))[package]


@contextmanager
def silenced() -> Iterator[None]:
    """Wraps calls of a package that prints. The output is hidden, and no other such call runs at the same time."""
    with _process, redirect_stdout(io.StringIO()):
        yield


@contextmanager
def alone() -> Iterator[None]:
    """Wraps calls into a package that draws from the process's random streams (`random` and numpy). No other such call runs at
    the same time, the streams are restored afterwards, and output is hidden."""
    with silenced():
        python, numpy = random.getstate(), np.random.get_state()
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


@contextmanager
def needs(package: str, extra: str) -> Iterator[None]:
    """Wraps the import of an optional package. If it is missing, the error names the extra to install.

    >>> with needs("no_such_package", "gym"):
    ...     import no_such_package
    Traceback (most recent call last):
    ...
    turnwise.errors.NotAvailableError: this environment needs the package no_such_package: pip install 'turnwise[gym]'
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != package:
            raise
        raise NotAvailableError(f"this environment needs the package {package}: pip install 'turnwise[{extra}]'") from error
