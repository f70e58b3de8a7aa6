"""Names of a module that are imported when they are used."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def attributes(
    module: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a module; ``homes`` has the room of each of its names."""

    def load(name: str) -> Any:
        here = sys.modules[module]
        if name not in homes:
            message = f"module {module!r} has no attribute {name!r}"
            raise AttributeError(message, name=name, obj=here)
        value = getattr(importlib.import_module(f"clipgrad.{homes[name]}"), name)
        setattr(here, name, value)
        return value

    return load, lambda: sorted({*vars(sys.modules[module]), *homes})
