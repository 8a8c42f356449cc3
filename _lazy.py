"""Names of a package that are imported when first used (PEP 562), so that importing it costs next to nothing.

An engine's start-up and a command line both import more than they use; this keeps torch, attrs and the adapters out
until something needs them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def attach(package: str, names: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` for a package: public name -> the relative module that holds it.

    A module of the package itself is written as its own name, as in `{"fusion": ".fusion"}`.
    """

    def load(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package])
        module = import_module(names[name], package)
        value = module if names[name] == f".{name}" and not hasattr(module, name) else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: sorted(names)
