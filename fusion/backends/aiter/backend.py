"""AITER as a backend of the fused ops: on ROCm GPUs, for the cases in which the installed functions are correct."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from attrs import frozen

from ..backend import Backend

if TYPE_CHECKING:
    from .binding import Bound
    from .calls import Call


@frozen(kw_only=True, eq=False)
class Aiter(Backend):
    """AITER's functions, which are in `table`. It imports nothing and looks at nothing until it is asked."""

    def load(self) -> Callable[..., Any]:
        """For a call of which nothing is known: the preferred binding that there is."""
        return _bound(self.op.name)[0].call

    def load_for(self, case: Any) -> Callable[..., Any]:
        """The preferred binding that takes the case."""
        call = call_of(case)
        return next(bound.call for bound in _bound(self.op.name) if bound.refuses(call) is None)

    def runs_on(self, device: str) -> tuple[bool, str]:
        """Whether the installed source has what is needed. Imports nothing of AITER."""
        if device != "cuda":
            return False, f"AITER's kernels run on AMD GPUs, not on {device}"
        import torch

        if torch.version.hip is None:
            return False, "AITER's kernels run on AMD GPUs, and this torch is not built for ROCm"
        from .binding import Probed, probe
        from .table import candidates

        found = [probe(binding.name) for binding in candidates(self.op.name)]
        there = [each.convention for each in found if isinstance(each, Probed)]
        if there:
            return True, "; or ".join(there)
        return False, _joined(each.reason for each in found if not isinstance(each, Probed))

    def refuses(self, case: Any) -> str | None:
        """Binds the functions, so that an AITER that cannot be imported is refused with its reason."""
        from .binding import Refused, bind
        from .table import candidates

        group = case._asdict().get("group")
        if group is not None:
            from .communicators import why_not

            if (absent := why_not(group)) is not None:
                return absent
        call, reasons = call_of(case), []
        for binding in candidates(self.op.name):
            found = bind(binding.name)
            reason = found.reason if isinstance(found, Refused) else found.refuses(call)
            if reason is None:
                return super().refuses(case)
            reasons.append(reason if binding.name == self.op.name else f"{binding.name}: {reason}")
        return _joined(reasons)

    def prepare(self, case: Any, device: Any) -> str | None:
        """An op of several ranks needs a communicator, which they make together."""
        group = case._asdict().get("group")
        if group is None:
            return None
        from . import communicators

        return None if communicators.ready(group, device) is not None else communicators.why_not(group)

    def settings(self, case: Any) -> str:
        """What the stages follow from. The communicators' own limits are compared when they are made."""
        from .binding import installed_releases

        return f"AITER {installed_releases()}" if "group" in case._asdict() else ""


def _bound(op: str) -> tuple[Bound, ...]:
    """The bindings of an op that can be used here.

    Raises:
        AiterUnavailableError: none can.
    """
    from .binding import Bound, Refused, bind
    from .errors import AiterUnavailableError
    from .table import candidates

    found = [bind(binding.name) for binding in candidates(op)]
    there = tuple(each for each in found if isinstance(each, Bound))
    if not there:
        raise AiterUnavailableError(op, _joined(each.reason for each in found if isinstance(each, Refused)))
    return there


def _joined(reasons: Iterable[str]) -> str:
    """Each reason once."""
    return "; ".join(dict.fromkeys(reasons)) or "AITER has no function for it that is known here"


def call_of(case: Any) -> Call:
    """An op's case in the words of the restrictions: of what `Call` does not know, nothing follows."""
    import attrs

    from .calls import Call

    said = case._asdict()
    weights = [value for name, value in said.items() if name.endswith("weight_dtype")]
    other = next((dtype for dtype in weights if dtype != case.dtype), case.dtype if weights else None)
    width = next(value for name, value in said.items() if name == "width" or name.endswith("_width"))
    known = {field.name: said[field.name] for field in attrs.fields(Call) if field.name in said}
    known |= {ours: said[theirs] for theirs, ours in _OTHERWISE.items() if theirs in said}
    if "group" in said:
        from ...ops.groups import world_size

        known["world_size"] = world_size(said["group"])
    return Call(**{**known, "width": width, "weight_dtype": other, "arch": _arch()})


_OTHERWISE = {"q_weight_offset": "weight_offset", "heads": "num_heads"}
"""What a case calls otherwise."""


@functools.cache
def _arch() -> str | None:
    """As gfx950, or None without an AMD GPU."""
    import torch

    if torch.version.hip is None or not torch.cuda.is_available():
        return None
    name: str = torch.cuda.get_device_properties(torch.cuda.current_device()).gcnArchName
    return name.partition(":")[0]
