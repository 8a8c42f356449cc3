"""The op that a chain composes to, and the chain written out as straight Python: nothing here needs torch.

Arguments come in the order rows, weights, epsilons, process group, tables of a rope, weight offsets, options; results in the order quantisation, norms, sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from attrs import evolve

from .declare import (
    Argument,
    Epsilon,
    GroupName,
    Index,
    Like,
    Op,
    Padded,
    Result,
    Rows,
    Table,
    Weight,
    WeightOffset,
)
from .steps.step import MIDDLE, SINKS, SOURCES, FusionError, Source, Step, main_step

_KINDS: tuple[type[Argument], ...] = (Rows, Weight, Epsilon, GroupName, Table, Index, WeightOffset)


def op_of(name: str, chain: Sequence[Step]) -> Op:
    """The op that does a chain in one launch.

    Raises:
        FusionError: a chain without rows.
    """
    arguments: dict[str, Argument] = {}
    for step in chain:
        for argument in step.arguments():
            arguments.setdefault(argument.name, argument)
    main = main_step(chain)
    if main is None:
        raise FusionError(
            f"{name}: a chain needs a step between sources and sinks, such as a Norm, to be composed to an op"
        )
    of = _rows_of(main)
    rows = [argument for argument in arguments.values() if isinstance(argument, Rows)]
    # Several norms share the leading dimensions of the first.
    for each in rows[1:]:
        if each.like is None:
            arguments[each.name] = evolve(each, like=rows[0].name)
    ordered = sorted(arguments.values(), key=_rank)
    results = tuple(_results(chain, of))
    return Op(
        name=name,
        doc=_sentence(chain, main),
        args=tuple(ordered),
        results=results,
        reference=Reference(name, tuple(chain), tuple(ordered), results),
        chain=tuple(chain),
    )


def is_inner(step: Step, chain: Sequence[Step]) -> bool:
    """Whether a step's result stays inside of an op: what another step takes is no result of its own, unless it is kept."""
    if any(step.out in each.takes for each in chain if each is not step and each.stage == MIDDLE):
        return True
    return step is main_step(chain) and not step.is_kept and any(each.stage == SINKS for each in chain)


def _rows_of(main: Step) -> str:
    return next(argument.name for argument in main.arguments() if isinstance(argument, Rows))


def _rank(argument: Argument) -> int:
    return next((rank for rank, kind in enumerate(_KINDS) if isinstance(argument, kind)), len(_KINDS))


def _results(chain: Sequence[Step], of: str) -> Iterator[Result]:
    for stage in (SINKS, MIDDLE, SOURCES):
        for step in chain:
            if step.stage == stage and not is_inner(step, chain):
                yield from step.results(of)


def _source(chain: Sequence[Step], main: Step) -> Source:
    return Source(main=main, several=sum(step.stage == MIDDLE for step in chain) > 1)


def _sentence(chain: Sequence[Step], main: Step) -> str:
    source, said = _source(chain, main), ""
    for step in chain:
        said = step.said(said, source)
    return f"{said}."


# ---- as source -------------------------------------------------------------------------------------------------------


def lines(chain: Sequence[Step], results: Sequence[Result]) -> Iterator[str]:
    """The chain as Python statements over the functions of `ops.arithmetic.REFERENCE`, and those of its steps and its format.

    What a sink takes is what the chain without it would give, rounded to the dtype of the rows.
    """
    main = main_step(chain)
    if main is None:
        raise FusionError("the chain has nothing between its sources and its sinks")
    source = _source(chain, main)
    for step in chain:
        yield from step.source(source)
        if step is main and any(each.stage == SINKS for each in chain):
            yield f"made_{step.out} = _store(made_{step.out}, {_rows_of(main)})"
    given = [
        f"_store(made_{each.name}, {each.of})" if isinstance(each, Like | Padded) else f"made_{each.name}"
        for each in results
    ]
    yield f"return {given[0]}" if len(given) == 1 else f"return ({', '.join(given)})"


def written(
    name: str, chain: Sequence[Step], arguments: Sequence[Argument], results: Sequence[Result], how: Mapping[str, Any]
) -> Callable[..., Any]:
    """The chain as one function of all arguments by position. `how`: the functions that `lines` names, but for those of steps and formats that it leaves out.

    It is written out as source, since a compiler guards every object that it meets on the way through a loop over steps.
    """
    body = "\n    ".join(lines(chain, results))
    scope = {name: function for step in chain for name, function in step.reference().items()}
    scope |= {step.format.op: step.format.function for step in chain if step.format is not None} | dict(how)
    source = f"def chain({', '.join(argument.name for argument in arguments)}):\n    {body}\n"
    exec(compile(source, f"<chain of {name}>", "exec"), scope)
    function: Callable[..., Any] = scope["chain"]
    return function


class Reference:
    """The reference of a composed op: its chain over the arithmetic of `ops.arithmetic`, written when first called."""

    def __init__(
        self, name: str, chain: tuple[Step, ...], arguments: tuple[Argument, ...], results: tuple[Result, ...]
    ) -> None:
        self._of = (name, chain, arguments, results)
        self._function: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        """All of the op's arguments by position."""
        return self.function(*args)

    @property
    def function(self) -> Callable[..., Any]:
        """The function itself."""
        if self._function is None:
            from .ops.arithmetic import REFERENCE

            self._function = written(*self._of, REFERENCE)
        return self._function

    def __repr__(self) -> str:
        return f"Reference({self._of[0]})"


__all__ = ["Reference", "is_inner", "lines", "op_of", "written"]
