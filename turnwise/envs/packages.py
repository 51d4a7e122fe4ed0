"""Environments that other packages bring."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from turnwise.errors import NotAvailableError


@contextmanager
def needs(package: str, extra: str) -> Iterator[None]:
    """Around the import of an optional package: where it is missing, the error names the extra that brings it.

    Raises:
        NotAvailableError: `package` isn't installed.

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
