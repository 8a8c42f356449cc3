"""What a backend is: where it runs an op, by which function, and what it refuses.

layerfuse's own stand in `declare.BACKENDS`, a package's in the entry points of the group `layerfuse.backends`: both by the path of a
class, which is imported when the first op that has a kernel of it is registered.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, ClassVar

from attrs import frozen

from ...adapters.errors import FOREIGN, LayerfuseError, said, shown
from ...registry.entry_points import of_group, unusable
from ..declare import BACKENDS, REFERENCE, Kernel, Op, OpError
from ..kernel_source import imported, why_absent

GROUP = "layerfuse.backends"
"""The group of entry points: a backend's name, and where its class is."""


class BackendError(LayerfuseError, LookupError):
    """A backend was asked for that does not exist, or that cannot run here."""


@frozen(kw_only=True, eq=False)
class Backend:
    """One backend, as it runs one op. This class is that of references, and of kernels whose backend has no rules of its own.

    A backend with rules is a class derived from it.
    """

    op: Op
    kernel: Kernel | None = None
    "None: the op's reference."

    only_by_name: ClassVar[frozenset[str]] = frozenset()
    "Device types where it is taken only when it is forced by name, because it is slow there."
    kernels: ClassVar[Mapping[str, Kernel]] = {}
    "By the names of ops: its kernels for ops that others declare. They come after the op's own, before its reference."

    @property
    def name(self) -> str:
        """As it is forced by."""
        return REFERENCE if self.kernel is None else self.kernel.backend

    def runs_on(self, device: str) -> tuple[bool, str]:
        """From torch's device type (cpu, cuda) to whether it runs there, and the reason in a sentence."""
        return True, f"plain torch runs on {device}"

    def refuses(self, case: Any) -> str | None:
        """From the op's case (dtypes, widths and options of a call) to why it cannot take it, or None where it can."""
        path = self.kernel and self.kernel.refuses
        return imported(path)(case) if path else None

    def load(self) -> Callable[..., Any]:
        """The function, with the op's arguments by position. Called once, when first chosen: it imports what it needs."""
        if self.kernel is None:
            return self.op.reference
        if self.kernel.function:
            return imported(self.kernel.function)
        made: Callable[..., Any] = imported(self.kernel.made_by)(self.op)
        return made

    def load_for(self, case: Any) -> Callable[..., Any] | None:  # noqa: ARG002
        """Where functions differ by case: that of a case that is not refused, asked once for each; else None."""
        return None

    def prepare(self, case: Any, device: Any) -> str | None:  # noqa: ARG002
        """Why a case could not be set up on a device, or None where it is: for an op of several ranks, which make this call together."""
        return None

    def steps(self, case: Any) -> tuple[int, ...]:
        """The numbers of tokens above which a case is launched in another way, which a warm-up has to touch: by the kernel's rule."""
        path = self.kernel and self.kernel.steps
        return imported(path)(case) if path else ()

    def settings(self, case: Any) -> str:  # noqa: ARG002
        """What else decides how a case runs, line by line: for an op of several ranks they must be alike on all."""
        return ""


def backend_of(op: Op, kernel: Kernel) -> Backend:
    """What runs an op by a declared kernel.

    Raises:
        BackendError: a package brings the kernel's backend, and it cannot be used.
    """
    found = BACKENDS.get(kernel.backend) or installed().get(kernel.backend, Backend)
    if isinstance(found, BackendError):
        raise found
    return (imported(found) if isinstance(found, str) else found)(op=op, kernel=kernel)


# ---- those of other packages -----------------------------------------------------------------------------------------


@cache
def installed() -> dict[str, type[Backend] | BackendError]:
    """What packages add, by name: the class, or why it cannot be used, which is a warning too. Of two of one name neither is taken."""
    owners: dict[str, str] = {}
    found: dict[str, type[Backend] | BackendError] = {}
    for point, package in of_group(GROUP):
        other = owners.setdefault(point.name, package)
        try:
            if point.name in found:
                raise BackendError(f"two backends are called {point.name!r}: one of {other}, one of {package}")
            found[point.name] = _read(point.name, point.load)
        except FOREIGN as error:  # a plugin may fail in any way
            why = str(error) if isinstance(error, LayerfuseError) else f"importing raised {said(error)}"
            sentence = unusable(point.name, package, why)
            found[point.name] = BackendError(sentence)
            warnings.warn(sentence, RuntimeWarning, stacklevel=2)
    return found


def _read(name: str, load: Callable[[], Any]) -> type[Backend]:
    if name in BACKENDS:
        raise BackendError(f"layerfuse has a backend called {name!r}")
    Kernel(backend=name, function="any:one")  # raises OpError for a name that no backend can have
    found = load()
    if not (isinstance(found, type) and issubclass(found, Backend)):
        raise BackendError(f"expected a class derived from Backend, got {shown(found)}")
    for op, kernel in dict(found.kernels).items():
        if not isinstance(kernel, Kernel) or kernel.backend != name:
            raise OpError(f"kernels[{shown(op)}]: expected a Kernel of backend {name!r}, got {shown(kernel)}")
        if (absent := next(filter(None, map(why_absent, kernel.paths)), None)) is not None:
            raise OpError(f"its kernel of {shown(op)}: {absent}")
    return found


def kernels_for(op: Op) -> Iterator[Kernel]:
    """The kernels that packages' backends have for an op that they did not declare; a warning of those that do not take its arguments."""
    for name, found in installed().items():
        if isinstance(found, BackendError) or op.name not in found.kernels:
            continue
        if why := found.kernels[op.name].why_not_for(op):
            warnings.warn(f"backend {name!r} is left out of {op.name}: {why}", RuntimeWarning, stacklevel=2)
        else:
            yield found.kernels[op.name]
