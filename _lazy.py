"""Names of a package that are imported when first used (PEP 562), so that importing it costs next to nothing.

An engine's start-up and a command line both import more than they use; this keeps torch, attrs and the adapters out
until something needs them. A package's public names stand once, in its `__init__.pyi`, which type checkers read too.
"""

from __future__ import annotations

import sys
from importlib import import_module

TYPE_CHECKING = False  # `typing` takes longer to import than this package; type checkers know the name
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def attach(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` for a package.

    Args:
        package: its name.
        file: its `__init__.py`. Beside it, `__init__.pyi` holds a line `from .module import name as name` for each public name.
    """
    stub = f"{file.rpartition('__init__.')[0]}__init__.pyi"
    loader: Any = sys.modules[package].__loader__
    try:  # by the package's own loader, which may read an archive
        data = loader.get_data(stub)
    except OSError as error:
        raise ImportError(
            f"{stub} is missing or cannot be read: this installation of layerfuse is incomplete"
        ) from error
    lines = [line.split() for line in data.decode().splitlines() if line.startswith("from ")]
    names = {name: module if module.strip(".") else f"{module}{name}" for _, module, _, name, *_ in lines}

    def load(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package])
        module = import_module(names[name], package)
        value = module if names[name] == f".{name}" and not hasattr(module, name) else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: sorted(names), sorted(names)
