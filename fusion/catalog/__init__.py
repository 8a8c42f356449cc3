"""Every fusion: the files of this folder, and what other packages declare by an entry point.

A package adds fusions by an entry point of the group `layerfuse.fusions` whose object is a `Fusion`, or several in a
list. It may not replace one that exists. An entry point that cannot be used is refused alone: a warning names it, and
everything else is known. Nothing here imports torch, though a plugin may.
"""

from __future__ import annotations

import importlib
import pkgutil
import threading
import warnings
from collections.abc import Iterator, Mapping
from itertools import chain, starmap
from typing import TYPE_CHECKING, Any

import attrs

from ...adapters.errors import FOREIGN, UnknownNameError, did_you_mean, said, shown
from ...registry.entry_points import of_group, unusable
from ..chain import COLLECTIVE, FAMILY, Fusion
from ..formats import FORMATS

if TYPE_CHECKING:
    from importlib import metadata

GROUP = "layerfuse.fusions"
"""The group of entry points."""


def canonical() -> tuple[str, ...]:
    """The ops of `ops.canonical`, which needs torch: like those of MLA layers, ops that no fusion may be called."""
    return "rms_norm", *(form.op for form in FORMATS.values())


class UnknownFusionError(UnknownNameError, KeyError):
    """No fusion has this name. `known` holds the names of the catalog."""

    def __str__(self) -> str:
        others = did_you_mean(self.name, self.known) or ". `layerfuse bench --list` lists all."
        return f"no fusion is called {shown(self.name)}{others}"


def built_in() -> Iterator[Fusion]:
    """The fusions of this folder: `FUSIONS` of every file, longest chain first, then by name."""
    files = (importlib.import_module(f"{__name__}.{each.name}") for each in pkgutil.iter_modules(__path__))
    found = [fusion for file in files for fusion in file.FUSIONS]
    yield from sorted(found, key=lambda fusion: (-fusion.length, fusion.name))


def of_plugin(point: metadata.EntryPoint, package: str) -> tuple[Fusion, ...] | str:
    """The fusions that one entry point declares, or why they cannot be taken: it cannot be imported, is no fusion, or names a kernel that is not there or takes other arguments."""
    try:
        content: Any = point.load()
        several = tuple(content) if isinstance(content, list | tuple) else (content,)
    except FOREIGN as error:  # a plugin may fail in any way
        return f"reading it raised {said(error)}"
    if not all(isinstance(each, Fusion) for each in several):
        return f"expected a Fusion or a list of them, got {shown(content)}"
    for fusion in several:
        own = [kernel for kernel in fusion.backends if kernel not in (*FAMILY, *COLLECTIVE)]
        # A kernel that refuses cases need not take what other forms have more.
        each = (
            (kernel, form.op) for kernel in own for form in fusion.forms if not kernel.refuses or form.op is fusion.op
        )
        why = next(filter(None, (kernel.why_not_for(op) for kernel, op in each)), None)
        if why is not None:
            return f"a kernel of {fusion.name}: {why}"
    return tuple(attrs.evolve(fusion, owner=package, entry_point=point.name) for fusion in several)


def clash(fusion: Fusion, other: Fusion) -> str | None:
    """Why there cannot be both of two fusions, naming both owners; None where there can."""
    if fusion.name == other.name:
        return (
            f"two fusions are called {fusion.name!r}: one of {other.owner}, one of {fusion.owner}. Rename one of them"
        )
    ops, others = ({form.op.name: form.op for form in each.forms} for each in (fusion, other))
    same = next((name for name in ops if name in others), None)
    if same is None:
        return None
    if fusion.op is not other.op:
        return (
            f"two ops are called {same!r}: that of {other.name} ({other.owner}) and that of {fusion.name} "
            f"({fusion.owner}). Rename one of them"
        )
    if fusion.backends != other.backends:
        return (
            f"{fusion.name} ({fusion.owner}) has other kernels for the op of {other.name} ({other.owner}), which has "
            "its own: give it an op of another name"
        )
    return None


def _taken(fusion: Fusion) -> str | None:
    """Why a fusion's ops cannot be called as they are: another op of layerfuse is, which is no fusion's."""
    from ..latent_ops import MLA
    from ..linear_ops import LINEARS

    alone = {op.name: op for op in (*MLA, *LINEARS)}
    for form in fusion.forms:
        if form.op.name in canonical() or alone.get(form.op.name, form.op) is not form.op:
            return f"two ops are called {form.op.name!r}: one of layerfuse, one of {fusion.owner}. Rename yours"
    return None


def _of_plugins(known: tuple[Fusion, ...]) -> tuple[list[Fusion], dict[tuple[str, str], str]]:
    """What entry points add to the known fusions, and why those that are refused are: of two that clash neither wins."""
    read: dict[tuple[str, str], tuple[Fusion, ...]] = {}
    refused: dict[tuple[str, str], str] = {}
    for point, package in of_group(GROUP):
        found = of_plugin(point, package)
        if isinstance(found, str):
            refused[point.name, package] = found
        else:
            read[point.name, package] = found
    every = [*known, *chain.from_iterable(read.values())]
    for key, fusions in read.items():
        others = ((fusion, other) for fusion in fusions for other in every if other is not fusion)
        problem = next(filter(None, (*map(_taken, fusions), *starmap(clash, others))), None)
        if problem is not None:
            refused[key] = problem
    added = [fusion for key, fusions in read.items() if key not in refused for fusion in fusions]
    return added, {key: unusable(*key, problem) for key, problem in refused.items()}


class Catalog(Mapping[str, Fusion]):
    """The fusions by name, in the order in which plans list them: read once, when first asked."""

    def __init__(self) -> None:
        self._fusions: dict[str, Fusion] | None = None
        self._refused: dict[tuple[str, str], str] = {}
        self._lock = threading.RLock()

    def _all(self) -> dict[str, Fusion]:
        if self._fusions is None:
            with self._lock:
                if self._fusions is None:
                    # That none of these clash is a test's to say: their ops would all be composed for it here.
                    found = {fusion.name: fusion for fusion in built_in()}
                    added, self._refused = _of_plugins(tuple(found.values()))
                    self._fusions = found | {fusion.name: fusion for fusion in added}
                    for sentence in self._refused.values():
                        warnings.warn(sentence, RuntimeWarning, stacklevel=1)
        return self._fusions

    @property
    def refused(self) -> Mapping[tuple[str, str], str]:
        """Why entry points cannot be used, by their names and packages."""
        self._all()
        return self._refused

    def refuse(self, fusion: Fusion, problem: str) -> None:
        """Leave out another package's fusion of which something was found only later, with a warning."""
        sentence = unusable(fusion.entry_point, fusion.owner, problem)
        with self._lock:
            self._fusions = {name: other for name, other in self._all().items() if name != fusion.name}
            self._refused[fusion.entry_point, fusion.owner] = sentence
        warnings.warn(sentence, RuntimeWarning, stacklevel=1)

    def check(self, name: str) -> None:
        """Refuse a name that no fusion has.

        Raises:
            UnknownFusionError: with the closest names.
        """
        if not isinstance(name, str) or name not in self:
            raise UnknownFusionError(name, self)

    def __getitem__(self, name: str) -> Fusion:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def __repr__(self) -> str:
        return f"Catalog({', '.join(self)})"

    def forget(self) -> None:
        """Read again when next asked: for tests that install a package."""
        with self._lock:
            self._fusions, self._refused = None, {}


FUSIONS = Catalog()
"""Every fusion by name."""
