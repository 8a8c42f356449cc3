"""The shadow check inside an engine: the first calls of each fused op at each site of a loaded model, in graphs and at seams, held to its reference."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from weakref import ref

import attrs
from torch import Tensor, nn

from ..adapters.errors import counted, first_of
from ..fusion.ops import FUNCTIONS
from ..fusion.rewrite.attribution import join
from ..fusion.shadow import Compared, Placed, Shadow
from .compiled_module import CompiledModule
from .host import here
from .placement import Put, is_looked_at
from .plugins import quietly
from .process import once
from .reporting import write_again

SILENT = "no call of its op was seen: its graphs are for other numbers of tokens, or were replayed as CUDA graphs"
NONE_SEEN = "no call of a fused op was seen, and no graph that holds one"

PATIENCE = 1000
"""Calls of a model in a row in which nothing was compared, after which nobody listens any more. An engine makes fewer before the first request."""
TIRED = f"in {PATIENCE} calls of the model in a row nothing was compared, and nobody listens any more"

COMPARES = "__layerfuse_compares__"
"""Under this name a module that an engine compiles holds what compares its calls."""


def compare_calls(model: nn.Module, compiled: CompiledModule, calls: int) -> None:
    """Compare so many calls at each site of a compiled module, as it is called; none where that is 0.

    A difference is a warning, in `strict` an error; all is in the report, and in the log after the first call and each that completes another site.
    """
    if not calls or not compiled.stands:
        return
    module = model.get_submodule(compiled.path)
    shadow = compiled.shadow = Shadow(calls, tell=lambda said: once(logging.WARNING, "layerfuse: %s", said))
    told: Any = None
    idle = 0

    def compared(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal told, idle
        was = shadow.to_dict()
        with shadow.hearing(*_looking(compiled, module), is_looked_at):
            result = run(*args, **kwargs)
        with quietly("reporting what was compared", compiled.strict):
            so_far = sum(each.calls for each in shadow.found)
            idle = 0 if so_far > sum(each["calls"] for each in was) else idle + 1
            over = idle >= PATIENCE
            if over:
                shadow.give_up(TIRED)
            if here().ranks()[0] == 0 and shadow.to_dict() != was:
                write_again(compiled)
            now = bool(shadow.found), so_far > 0, shadow.complete, over
            if now != told:
                told = now
                _say(compiled, shadow, calls, NONE_SEEN if not over else f"{NONE_SEEN}; {TIRED}")
            if over or (shadow.found and shadow.complete == len(shadow.found)):
                leave()
        if compiled.strict:
            shadow.check()
        return result

    leave = _around_calls(module, compared) if compiled.at_modules is None else _around_forward(model, compared)


def _around_forward(model: nn.Module, compared: Callable[..., Any]) -> Callable[[], None]:
    """Stand around a model's forward. Gives what takes it out."""
    own, before = model.forward, {**vars(model)}

    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return compared(own, *args, **kwargs)

    model.forward = forward
    return Put.at(model, "forward", before).take_out


def _around_calls(module: nn.Module, compared: Callable[..., Any]) -> Callable[[], None]:
    """Stand around the calls of a module that an engine compiles, whose class has a __call__ of its own. Gives what takes it out."""
    cls: Any = next(each for each in type(module).__mro__ if "__call__" in vars(each))
    own, which = cls.__call__, ref(module, lambda _: out())
    vars(module)[COMPARES] = compared  # the class is to hold nothing of the model

    @functools.wraps(own)
    def around(self: Any, *args: Any, **kwargs: Any) -> Any:
        still = which()
        if still is None:
            out()  # its module went while another one stood around this
        comparing = vars(self).get(COMPARES) if self is still else None
        return own(self, *args, **kwargs) if comparing is None else comparing(own, self, *args, **kwargs)

    def out() -> None:
        if cls.__call__ is around:
            cls.__call__ = own

    def leave() -> None:
        vars(module).pop(COMPARES, None)
        out()

    cls.__call__ = around
    return leave


def _looking(
    compiled: CompiledModule, module: nn.Module
) -> tuple[Callable[[], Sequence[Placed]], str, Callable[[tuple[Any, ...]], str | None]]:
    """What a hearing is told of one call of a module: its ops at sites, why one is not called, and where what is none of these stands."""
    parameters: dict[str, Tensor] = {}
    holders: dict[int, str] = {}
    with quietly("looking at a model's weights", compiled.strict):
        parameters.update(module.named_parameters(remove_duplicate=False))
        for name, each in parameters.items():
            holders.setdefault(each.data_ptr(), name.rpartition(".")[0])
    known: Sequence[Placed] = ()
    of: Any = None

    def placed() -> Sequence[Placed]:
        nonlocal known, of
        now = len(compiled.pieces), [each.left_to_engine() for each in compiled.placements.values()]
        if now != of:
            of = now
            with quietly("looking where fused ops stand", compiled.strict):
                known = tuple(_placed(compiled, parameters))
        return known

    def holder_of(given: tuple[Any, ...]) -> str | None:
        held = (holders.get(each.data_ptr()) for each in given if isinstance(each, Tensor) and each.numel())
        return next(filter(None, held), None)

    return placed, SILENT, holder_of


def _placed(compiled: CompiledModule, parameters: Mapping[str, Tensor]) -> Iterator[Placed]:
    """Every op at every site, as often as the range of tokens that has most of it calls it there."""
    by_range: dict[str, Counter[tuple[str, str, str]]] = {}
    for piece in compiled.pieces:
        uses = ((use.site, use.fused, use.form) for use in piece.record.uses if use.fused and use.form)
        by_range.setdefault(piece.tokens, Counter()).update(uses)
    most: Counter[tuple[str, str, str]] = Counter()
    for each in by_range.values():
        most |= each
    for placement in compiled.placements.values():
        left = placement.left_to_engine()
        for site, ops in placement.calls().items():
            if site not in left:
                most.update((site, placement.fusions_at(site)[1], op) for op in ops if op in FUNCTIONS)
    for site, fusion, op in most.elements():
        at = compiled.plan.site.get(site)
        names = () if at is None else (join(at.layer, join(path or "", "weight")) for path in at.modules)
        weights = tuple(parameters[name] for name in names if name in parameters)
        path = None if at is None or weights else at.path
        yield Placed(site=site, fusion=fusion, op=op, weights=weights, path=path)


def _say(compiled: CompiledModule, shadow: Shadow, calls: int, nothing: str) -> None:
    """On the first rank: what was compared so far, sites that are right and alike in one line; `nothing`: what is said where no op is known of."""
    if here().ranks()[0] != 0:
        return
    alike: dict[tuple[Any, ...], list[Compared]] = {}
    for each in shadow.found:
        wrong = None if each.beyond is None else each.site  # has a line of its own
        key = (each.fusion, each.op, each.backend, each.calls, wrong, each.not_compared)
        alike.setdefault(key, []).append(each)
    lines = [f"layerfuse: shadow check of {counted(calls, 'call')} at each site of {compiled.name}:"]
    for several in alike.values():
        site, largest = first_of([each.site for each in several]), max(each.largest for each in several)
        lines.append(str(attrs.evolve(several[0], site=site, largest=largest)))
    lines += [] if alike else [nothing]
    here().logger.log(logging.WARNING if shadow.beyond else logging.INFO, "%s", "\n  ".join(lines))
