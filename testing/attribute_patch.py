"""Taking an attribute away from a live layer, or changing it, and putting everything back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from typing import Any

from ..adapters.sources import Path, is_index


class CannotOperateError(Exception):
    """Nothing along the path can be changed."""


def owner_of(root: Any, path: Path) -> tuple[Any, str, tuple[str, ...]]:
    """The last step of a path that can be taken away: its owner, its name, and the steps up to it.

    `weight.shape.0` cannot lose its shape, but the norm can lose its weight.

    Raises:
        CannotOperateError: no step can.
        UnreadableError: the path leads nowhere on this layer.
    """
    path.read(root)
    for depth in range(len(path.steps), 0, -1):
        name = path.steps[depth - 1]
        owner = Path(path.steps[: depth - 1]).read(root) if depth > 1 else root
        if isinstance(owner, MutableMapping) or (not is_index(name) and _is_plain_object(owner)):
            return owner, name, path.steps[:depth]
    raise CannotOperateError(f"{path}: nothing along it can be changed")


def _is_plain_object(owner: Any) -> bool:
    # Tensors and their shapes have attributes that nothing can take away.
    return hasattr(owner, "__dict__") and not hasattr(owner, "data_ptr")


@contextmanager
def without(root: Any, path: Path) -> Iterator[tuple[str, ...]]:
    """A block in which the path leads nowhere. Gives the steps up to what was taken away."""
    owner, name, steps = owner_of(root, path)
    with _restored(owner):
        if isinstance(owner, MutableMapping):
            del owner[name]
        else:
            with suppress(AttributeError):
                delattr(owner, name)
            if hasattr(owner, name):  # a property, or a default of the class
                _hide(owner, name)
        yield steps


@contextmanager
def changed(root: Any, path: Path, value: Any) -> Iterator[None]:
    """A block in which the path leads to another value."""
    owner, name, steps = owner_of(root, path)
    if steps != path.steps:
        raise CannotOperateError(f"{path}: only {'.'.join(steps)} can be changed")
    with _restored(owner):
        if isinstance(owner, MutableMapping):
            owner[name] = value
        else:
            # A module refuses to put a plain value where a parameter or a child was.
            for table in _tables(owner):
                table.pop(name, None)
            try:
                setattr(owner, name, value)
            except Exception:  # a config class that checks types as they are set
                vars(owner)[name] = value
        yield


@contextmanager
def _restored(owner: Any) -> Iterator[None]:
    if isinstance(owner, MutableMapping):
        before = dict(owner)
        try:
            yield
        finally:
            owner.clear()
            owner.update(before)
        return
    # Whole tables, so that the order of children and parameters comes back too.
    kind = type(owner)
    tables = [(table, dict(table)) for table in (*_tables(owner), vars(owner))]
    try:
        yield
    finally:
        if type(owner) is not kind:
            object.__setattr__(owner, "__class__", kind)
        for table, content in tables:
            table.clear()
            table.update(content)


def _tables(owner: Any) -> list[dict[str, Any]]:
    """Where a torch module keeps its children and parameters; nothing for other objects."""
    own = vars(owner)
    return [own[name] for name in ("_modules", "_parameters", "_buffers") if isinstance(own.get(name), Mapping)]


def _hide(owner: Any, name: str) -> None:
    kind: Any = type(owner)

    def missing(self: Any, asked: str) -> Any:
        if asked == name:
            raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}", name=name, obj=self)
        return kind.__getattribute__(self, asked)

    body: dict[str, Any] = {"__getattribute__": missing, "__module__": kind.__module__, "__slots__": ()}
    if hasattr(kind, "__getattr__"):

        def fallback(self: Any, asked: str) -> Any:
            if asked == name:
                raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}", name=name, obj=self)
            return kind.__getattr__(self, asked)

        body["__getattr__"] = fallback
    metaclass: Any = type(kind)
    object.__setattr__(owner, "__class__", metaclass(kind.__name__, (kind,), body))
