"""Helpers for environments of other packages: the tables of `packages.yaml`, and guards around calls into the
packages."""

import io
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from functools import cache
from typing import Any

import numpy as np

from turnwise.errors import NotAvailableError, install_hint
from turnwise.spec.package_tables import read_table

_process = threading.Lock()


@cache
def known_of(package: str) -> Any:
    """The section of `packages.yaml` about a package."""
    return read_table(__file__, "packages.yaml")[package]


@contextmanager
def silenced() -> Iterator[None]:
    """Surrounds calls into a package that prints: hides the output, and lets only one such call run at a
    time."""
    with _process, redirect_stdout(io.StringIO()):
        yield


@contextmanager
def alone() -> Iterator[None]:
    """Like `silenced`, for a package that draws from the global generators of `random` and numpy: restores
    them afterwards."""
    with silenced():
        python_state = random.getstate()
        numpy_state = np.random.get_state()
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


@contextmanager
def needs(package: str, extra: str) -> Iterator[None]:
    """Surrounds the import of an optional package. If the package is missing, the error names the extra to
    install.

    >>> with needs("nosuch", "gym"):  # doctest: +ELLIPSIS
    ...     import nosuch
    Traceback (most recent call last):
    ...
    turnwise.errors.NotAvailableError: this environment needs the package nosuch: pip install -e '.[gym]' ...
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != package:
            raise
        raise NotAvailableError(
            f"this environment needs the package {package}: {install_hint(extra)}"
        ) from error
