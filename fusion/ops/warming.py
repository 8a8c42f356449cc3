"""Launch every variant of what a run has called, for fewer rows: a kernel is compiled at its first launch, and nobody should wait for that later.

How a kernel is launched depends on the number of rows. A server's first run has the most rows it will ever have; which other
numbers have launches of their own is what the backend says (`Backend.steps`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from attrs import evolve, frozen
from torch import Tensor

from .. import backends
from ..declare import Argument, GroupName, Index, LinearWeight, Op, Rows, RowScales, TokenScales
from .agreement import agree
from .library import case_maker, declared, overload

_GRID = 16
"""Bytes: kernels are compiled for whether tensors start there."""

_Memory: TypeAlias = "dict[tuple[torch.dtype, torch.device], Tensor]"


@frozen
class _Shape:
    """All of a tensor that decides how a kernel is launched."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    beyond: int
    "Elements from the grid to its start."

    def view_of(self, memory: _Memory) -> Tensor:
        """A tensor like this. All of them share memory, as inputs may."""
        key = self.dtype, self.device
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        size = self.beyond + last + 1
        if key not in memory or memory[key].numel() < size:
            memory[key] = torch.ones(size, dtype=self.dtype, device=self.device)
        return memory[key].as_strided(self.shape, self.strides, self.beyond)


Call: TypeAlias = "tuple[str, tuple[Any, ...]]"
"""An op's name, and its arguments with a `_Shape` in the place of each tensor."""


@contextmanager
def recording() -> Iterator[dict[Call, None]]:
    """The calls of ops that are made from chains, and of linears, in this process while this lasts: each once, in their order. Others write to caches."""
    calls: dict[Call, None] = {}

    def take_down(name: str, given: tuple[Any, ...]) -> None:
        op = declared(name)
        if op.chain is None and not any(isinstance(argument, LinearWeight) for argument in op.args):
            return
        # What ranks call together has to be alike on all of them, and addresses are not.
        alone = not any(isinstance(argument, GroupName) for argument in declared(name).args)
        calls[name, tuple(_shape(each, alone) if isinstance(each, Tensor) else each for each in given)] = None

    with backends.listening(take_down):
        yield calls


def _shape(tensor: Tensor, placed: bool) -> _Shape:
    beyond = tensor.data_ptr() % _GRID // tensor.element_size() if placed else 0
    return _Shape(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, beyond)


def warm_up(calls: dict[Call, None], never: range = range(0), tokens: int = 0, most: int = 0) -> int:
    """Make calls like those recorded, with every number of rows up to theirs that has a launch of its own. How many that were.

    What is launched for numbers of rows alone that `never` come is left out. Where the run that was recorded had fewer `tokens` than the
    `most` that others have, the rows are as many times more.

    Where ops are called by several ranks together, all of them make this call, with what they recorded together. They compare what
    they are about to launch: a rank that launched less would leave the others waiting in a kernel.

    Raises:
        RankDisagreementError: they would not launch the same, or one has no memory for it; then nobody launches anything.
    """
    memory: _Memory = {}
    problem: Exception | None = None
    made: tuple[Call, ...] = ()
    with torch.inference_mode():
        try:
            made = tuple(_planned(calls, memory, never, tokens, most))
        except Exception as error:  # the other ranks wait to hear of it
            problem = error
        for group in _groups(calls):
            together = [f"{name} of {given[0].shape}" for name, given in made if group in _groups([(name, given)])]
            agree(
                group,
                "the launches at load",
                f"{type(problem).__name__}: {problem}" if problem else "\n".join(together),
            )
        if problem is not None:
            raise problem
        _compile_ahead(made, memory)
        for name, given in made:
            overload(name)(*_tensors(given, memory))
    return len(made)


def _compile_ahead(made: tuple[Call, ...], memory: _Memory) -> None:
    """Compile several kernels at once for calls that a rank makes alone on a GPU; each would be compiled by itself when it is launched."""
    alone = [(name, given) for name, given in made if given[0].device.type == "cuda" and not _groups([(name, given)])]
    if len(alone) < 2:
        return
    from ..backends.triton import launcher

    with launcher.compiling_ahead() as ahead:
        for name, given in alone if ahead else ():
            overload(name)(*_tensors(given, memory))


def _planned(calls: Iterable[Call], memory: _Memory, never: range, tokens: int, most: int) -> dict[Call, None]:
    """The calls to make, each once, with memory for every one."""
    made: dict[Call, None] = {}
    for name, given in calls:
        op = declared(name)
        rows = _rows(op, given)
        if not rows:
            continue
        if 0 < tokens < most and not rows % tokens:
            rows = rows // tokens * most
        few = _tensors(_resized(op, given, 1), memory)
        steps = backends.steps(name, few[0].device.type, case_maker(op)(*few))
        firsts = sorted({1, *(step + 1 for step in steps if step < rows)}) if steps else []
        for number, following in zip(firsts, [*firsts[1:], rows + 1], strict=False):
            if number in never and following - 1 in never:
                continue
            resized = _resized(op, given, number)
            _tensors(resized, memory)
            made[name, resized] = None
    return made


def _groups(calls: Iterable[Call]) -> dict[str, None]:
    """The process groups that are called in."""
    return {
        each: None
        for name, given in calls
        for argument, each in zip(declared(name).args, given, strict=True)
        if isinstance(argument, GroupName)
    }


def _lead(op: Op, given: tuple[Any, ...]) -> int:
    """How many dimensions of the first rows are counted."""
    return len(given[0].shape) - (2 if op.rows[0].heads else 1)


def _rows(op: Op, given: tuple[Any, ...]) -> int:
    count = 1
    for size in given[0].shape[: _lead(op, given)]:
        count *= size
    return count


def _resized(op: Op, given: tuple[Any, ...], number: int) -> tuple[Any, ...]:
    lead = _lead(op, given)

    def resized(argument: Argument, each: Any) -> Any:
        if isinstance(argument, Rows) and lead:
            return _Shape((number, *each.shape[lead:]), each.strides[lead - 1 :], each.dtype, each.device, each.beyond)
        of_rows = isinstance(argument, TokenScales) and each.shape[:-1] == given[0].shape[:lead]
        if (isinstance(argument, RowScales) or of_rows) and lead:  # by rows or by columns
            return evolve(each, shape=(number, *each.shape[lead:]), strides=each.strides[lead - 1 :])
        return evolve(each, shape=(number,)) if isinstance(argument, Index) and each is not None else each

    return tuple(resized(argument, each) for argument, each in zip(op.args, given, strict=True))


def _tensors(given: tuple[Any, ...], memory: _Memory) -> tuple[Any, ...]:
    return tuple(each.view_of(memory) if isinstance(each, _Shape) else each for each in given)
