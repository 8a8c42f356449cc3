"""All-reduces of others: what sums the ranks' rows, each set of inputs where it is fastest for that.

NCCL's (gloo's on a CPU) and the two of torch over symmetric memory. vLLM's is in `vllm_all_reduce`.
"""

from __future__ import annotations

import functools
import importlib.util
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor

from ..fusion.steps import AllReduce
from .against import LIBRARIES, ONE_SHOT, TWO_SHOT
from .cases import step_of
from .inputs import Work
from .peers import Setting
from .rank_group import rank_group


@frozen(kw_only=True, eq=False)
class Reduction:
    """The all-reduce of one set of inputs."""

    part: Tensor
    "What is summed, a copy of the set's rows as this all-reduce's own, (tokens, width)."
    total: Tensor
    "Where the sum lies after a call: `part` itself where it is written over."
    run: Callable[[], object]
    "Queue it. All ranks make the same calls in the same order."


@frozen(kw_only=True, eq=False)
class Reducer:
    """Somebody's all-reduce."""

    name: str
    about: str
    why_not: Callable[[Setting], str | None]
    make: Callable[[Work, Setting], Sequence[Reduction]]
    "One per set. All ranks make this call."
    captured: Callable[[], None] | None = None
    "As `Peer.captured`."
    version: Callable[[Setting], str | None] = lambda _: None

    def reductions(self, work: Work, setting: Setting) -> Sequence[Reduction]:
        """One per set, the same for all who ask with the same work."""
        made: Sequence[Reduction] = remembered(work, self.name, lambda: self.make(work, setting))
        return made


_memory: weakref.WeakKeyDictionary[Work, dict[str, Any]] = weakref.WeakKeyDictionary()


def remembered(work: Work, name: str, make: Callable[[], Any]) -> Any:
    """What was made of some work under a name: several peers share it."""
    known = _memory.setdefault(work, {})
    if name not in known:
        known[name] = make()
    return known[name]


def parts_of(work: Work) -> list[Tensor]:
    """This rank's part of each set's sum."""
    reduced = step_of(work.case.form, AllReduce)
    place = next(place for place, rows in enumerate(work.case.form.op.rows) if reduced and rows.name == reduced.x)
    return [rows[place] for rows in work.sets]


def copies_in(arena: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
    """Copies of tensors one after another in a flat tensor of their dtype, each on a grid of 256 bytes."""
    pitch = pitch_of(parts[0])
    copies = [arena[number * pitch :][: part.numel()].view(part.shape) for number, part in enumerate(parts)]
    for copy, part in zip(copies, parts, strict=True):
        copy.copy_(part)
    return copies


def pitch_of(part: Tensor) -> int:
    """Elements from one of `copies_in` to the next."""
    grid = 256 // int(part.element_size())
    return -(-int(part.numel()) // grid) * grid


# ---- torch.distributed


def _library(work: Work, _: Setting) -> list[Reduction]:
    found = []
    for part in parts_of(work):
        own = part.clone()
        found.append(Reduction(part=own, total=own, run=functools.partial(dist.all_reduce, own)))
    return found


# ---- torch over symmetric memory

_arenas: dict[tuple[str, torch.dtype], Tensor] = {}
"""By user and dtype: symmetric memory that all ranks have mapped. It grows when more is asked for."""


def _symmetric(user: str, parts: Sequence[Tensor]) -> list[Tensor]:
    import torch.distributed._symmetric_memory as symmetric_memory

    key, needed = (user, parts[0].dtype), len(parts) * pitch_of(parts[0])
    if key not in _arenas or _arenas[key].numel() < needed:
        _arenas.pop(key, None)
        with torch.inference_mode(False):
            arena = symmetric_memory.empty(needed, dtype=parts[0].dtype, device=parts[0].device)
            symmetric_memory.rendezvous(arena, dist.group.WORLD.group_name)
        _arenas[key] = arena
    return copies_in(_arenas[key], parts)


def _one_shot(work: Work, _: Setting) -> list[Reduction]:
    group, call = dist.group.WORLD.group_name, torch.ops.symm_mem.one_shot_all_reduce_out
    found = []
    for part in _symmetric("one-shot", parts_of(work)):
        total = torch.empty_like(part)
        found.append(Reduction(part=part, total=total, run=functools.partial(call, part, "sum", group, total)))
    return found


def _two_shot(work: Work, _: Setting) -> list[Reduction]:
    group, call = dist.group.WORLD.group_name, torch.ops.symm_mem.two_shot_all_reduce_
    return [
        Reduction(part=part, total=part, run=functools.partial(call, part, "sum", group))
        for part in _symmetric("two-shot", parts_of(work))
    ]


def _why_not_symmetric(setting: Setting) -> str | None:
    if setting.device != "cuda":
        return f"symmetric memory is for GPUs, not for {setting.device}"
    if torch.version.hip or importlib.util.find_spec("torch.distributed._symmetric_memory") is None:
        return f"torch {torch.__version__} has no symmetric memory for NVIDIA GPUs"
    if not hasattr(torch.ops.symm_mem, "one_shot_all_reduce_out"):
        return f"torch {torch.__version__} has no all-reduce over symmetric memory"
    if setting.case.dtype == "fp16":
        return "torch's all-reduces over symmetric memory take bf16 and fp32"
    # Each rank sums whole vectors of its share.
    if setting.case.width_of(setting.case.form.op.rows[0].name) % (rank_group().size * 8):
        return "the width is not a multiple of 16 bytes for each rank"
    return None


SYMMETRIC = "; x lies in symmetric memory already, so that no copy into it is timed"


def reducers(setting: Setting) -> list[Reducer]:
    """Those of torch, here or not."""
    library = LIBRARIES[setting.device]
    return [
        Reducer(
            name=library,
            about=f"torch.distributed.all_reduce over {library}, in place",
            why_not=lambda _: None,
            make=_library,
        ),
        Reducer(
            name=ONE_SHOT,
            about=f"torch.ops.symm_mem.one_shot_all_reduce_out{SYMMETRIC}",
            why_not=_why_not_symmetric,
            make=_one_shot,
        ),
        Reducer(
            name=TWO_SHOT,
            about=f"torch.ops.symm_mem.two_shot_all_reduce_, in place{SYMMETRIC}",
            why_not=_why_not_symmetric,
            make=_two_shot,
        ),
    ]
