"""What a fused all-reduce has to beat: somebody's all-reduce, then an add and norm of the same form, by Inductor or by our kernel.

Each all-reduce is timed alone too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import attrs
from torch import Tensor

from . import ours, plain_torch, sums
from .against import ALONE, BEHIND
from .cases import Case, forms
from .inputs import Work
from .peers import OURS, Call, InPlace, Peer, Setting
from .reducers import Reducer, Reduction, parts_of, reducers, remembered
from .vllm_all_reduce import vllm_reducer

Function = Callable[..., tuple[Tensor, ...]]
Behind = Callable[[Work, Work, Setting], Sequence[Call | None]]
"""From the work, the same without its all-reduce on rows that are summed, and its setting: what comes behind each reduction."""


def unfused_peers(setting: Setting) -> list[Peer]:
    """Three for each all-reduce: with Inductor's add and norm behind it, with ours, and alone."""
    return [peer for reducer in (*reducers(setting), vllm_reducer()) for peer in _three(reducer, setting)]


def _three(reducer: Reducer, setting: Setting) -> Iterator[Peer]:
    local = local_case(setting.case)
    behind = {
        "inductor": ("torch.compile of the plain add and norm", plain_torch.why_no_inductor, _inductor),
        OURS: ("layerfuse's kernel without the all-reduce", lambda _: None, _ours),
    }
    for name, (about, why_not, calls) in behind.items():
        yield Peer(
            name=reducer.name + BEHIND + name,
            about=f"{reducer.about}, then {about}",
            why_not=functools.partial(_why_not, reducer, local, why_not),
            build=functools.partial(_build, reducer, local, calls),
            captured=reducer.captured,
            version=reducer.version,
        )
    yield Peer(
        name=reducer.name + ALONE,
        about=f"{reducer.about}, with nothing behind it",
        why_not=reducer.why_not,
        build=functools.partial(_build, reducer, None, _nothing),
        captured=reducer.captured,
        version=reducer.version,
        check=sums.check_sum,
    )


def local_case(case: Case) -> Case | None:
    """The same form without its all-reduce; None where the catalog has none."""
    name = case.op.removeprefix("all_reduce_")
    found = next((fusion.name for fusion, form in forms().values() if form.op.name == name), None)
    return None if found is None else attrs.evolve(case, fusion=found, op=name, ranks=1)


def _why_not(
    reducer: Reducer, local: Case | None, why_not: Callable[[Setting], str | None], setting: Setting
) -> str | None:
    if local is None:
        return f"the catalog has no form of {setting.case.op} without its all-reduce"
    return reducer.why_not(setting) or why_not(attrs.evolve(setting, case=local))


def _build(reducer: Reducer, local: Case | None, behind: Behind, work: Work, setting: Setting) -> list[Call]:
    reductions, parts = reducer.reductions(work, setting), parts_of(work)
    # The sum takes the place of this rank's part.
    totals = {id(part): found.total for part, found in zip(parts, reductions, strict=True)}
    sets = tuple(tuple(totals.get(id(rows), rows) for rows in each) for each in work.sets)
    case = work.case if local is None else local
    after = behind(work, attrs.evolve(work, case=case, sets=sets), attrs.evolve(setting, case=case))
    return [_call(found, part, call) for found, part, call in zip(reductions, parts, after, strict=True)]


def _call(found: Reduction, part: Tensor, behind: Call | None) -> Call:
    def call(*_: Tensor) -> tuple[Tensor, ...]:
        found.run()
        return (found.total,) if behind is None else behind()

    return InPlace(call, [part], [found.part]) if found.total is found.part else call


def _nothing(work: Work, _local: Work, _: Setting) -> Sequence[None]:
    return [None] * len(work.sets)


def _inductor(work: Work, local: Work, _: Setting) -> Sequence[Call]:
    """Compiled once for all the all-reduces: their sums are alike in shape, strides and dtype."""
    function: Function = remembered(work, "inductor", lambda: plain_torch.compiled(None, None, local))
    return [functools.partial(function, *rows) for rows in local.sets]


def _ours(_: Work, local: Work, setting: Setting) -> Sequence[Call]:
    chosen = ours.chosen_name(setting)
    return next(peer for peer in ours.our_peers(setting) if peer.name == chosen).build(local, setting)
