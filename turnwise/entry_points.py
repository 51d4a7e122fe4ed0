"""`module:Class` → the class, imported when it is first needed."""

from __future__ import annotations

import importlib
import traceback

from turnwise.errors import TurnwiseError, nearest


def load_class(entry_point: str, key: str, error: type[TurnwiseError]) -> type:
    """The class that an entry point names. `key` is the setting that gave it, for the message.

    >>> load_class("collections:OrderedDict", "env_type", TurnwiseError).__name__
    'OrderedDict'

    Raises:
        error: the text isn't `module:Class`, there is no such module or class, or the module fails when it is imported.
    """
    module_name, _, class_name = entry_point.partition(":")
    if not module_name or not class_name:
        raise error(f"{key} {entry_point!r} must be 'module:Class'")
    try:
        module = importlib.import_module(module_name)
    except Exception as fault:  # boundary: a user's module may raise anything
        if isinstance(fault, ModuleNotFoundError) and fault.name and f"{module_name}.".startswith(f"{fault.name}."):
            raise error(
                f"{key} {entry_point!r}: no module {fault.name!r} on Python's path; the `turnwise` command looks in the "
                "working directory too, other programs need PYTHONPATH=. or the installed package that holds it"
            ) from fault
        where = traceback.extract_tb(fault.__traceback__)[-1]
        raise error(
            f"{key} {entry_point!r}: importing {module_name} failed with {type(fault).__name__}: {fault} "
            f"({where.filename}, line {where.lineno}); mend it, or name another class"
        ) from fault
    names = vars(module)
    found = names.get(class_name)
    if not isinstance(found, type):
        classes = [name for name, value in names.items() if isinstance(value, type) and value.__module__ == module_name]
        raise error(
            f"{key} {entry_point!r}: {module_name} has no class {class_name!r}; its classes are "
            f"{', '.join(classes) or 'none'}.{nearest(class_name, classes)}"
        )
    return found
