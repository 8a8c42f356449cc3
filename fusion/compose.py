"""The op that a chain composes to, and the chain written out as straight Python: nothing here needs torch.

Arguments come in the order rows, weights, epsilons, process group, weight offsets, options; results in the order quantisation, norms, sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .declare import Argument, Epsilon, GroupName, Like, Op, Padded, Result, Rows, Weight, WeightOffset
from .steps import Add, AllReduce, FusionError, GatedNorm, Norm, Pad, Quant, SiluMul, Step

_KINDS: tuple[type[Argument], ...] = (Rows, Weight, Epsilon, GroupName, WeightOffset)


def op_of(name: str, chain: Sequence[Step]) -> Op:
    """The op that does a chain in one launch.

    Raises:
        FusionError: a chain without rows.
    """
    arguments: dict[str, Argument] = {}
    for step in chain:
        for argument in step.arguments():
            arguments.setdefault(argument.name, argument)
    main = quantised_step(chain)
    if main is None:
        raise FusionError(f"{name}: a chain needs a Norm, GatedNorm or SiluMul to be composed to an op")
    of = next(argument.name for argument in main.arguments() if isinstance(argument, Rows))
    rows = [argument for argument in arguments.values() if isinstance(argument, Rows)]
    # Several norms share the leading dimensions of the first.
    for each in rows[1:]:
        if each.like is None:
            arguments[each.name] = Rows(name=each.name, width=each.width, like=rows[0].name, doc=each.doc)
    ordered = sorted(arguments.values(), key=_rank)
    return Op(
        name=name,
        doc=_sentence(chain),
        args=tuple(ordered),
        results=tuple(_results(chain, main, of)),
        reference=Reference(name, tuple(chain), tuple(ordered), tuple(_results(chain, main, of))),
        chain=tuple(chain),
    )


def quantised_step(chain: Sequence[Step]) -> Norm | GatedNorm | SiluMul | None:
    """The step whose result a quantisation or a padding takes: the first norm, or the product."""
    return next((step for step in chain if isinstance(step, Norm | GatedNorm | SiluMul)), None)


def _rank(argument: Argument) -> int:
    return next((rank for rank, kind in enumerate(_KINDS) if isinstance(argument, kind)), len(_KINDS))


def _results(chain: Sequence[Step], main: Step, of: str) -> Iterator[Result]:
    ends = [step for step in chain if isinstance(step, Quant | Pad)]
    for end in ends:
        yield from end.results(of)
    for step in chain:
        inside = step is main and ends and not (isinstance(step, Norm) and step.kept)
        if not isinstance(step, AllReduce | Add | Quant | Pad) and not inside:
            yield from step.results(of)
    for step in chain:
        if isinstance(step, Add):
            yield from step.results(of)


def _sentence(chain: Sequence[Step]) -> str:
    add = any(isinstance(step, Add) for step in chain)
    norms = [step for step in chain if isinstance(step, Norm)]
    if any(isinstance(step, SiluMul) for step in chain):
        said = "`silu(gate) * up`"
    elif any(isinstance(step, GatedNorm) for step in chain):
        said = "The gated RMSNorm of each head"
    elif len(norms) > 1:
        said = "RMSNorm of the query latent and of the key/value latent (DeepSeek-V2, arXiv 2405.04434, section 2.1)"
    else:
        summed = (
            "`all-reduce of x, + residual`" if any(isinstance(step, AllReduce) for step in chain) else "`x + residual`"
        )
        said = f"RMSNorm of {summed}, and the sum itself" if add else "RMSNorm over the last dimension"
    for step in chain:
        if isinstance(step, Quant):
            what = f"{norms[0].x} " if len(norms) > 1 else ""
            said += f"; {what}quantised ({_QUANTS[step.per]})"
            said += "; the norm itself too" if norms and norms[0].kept else ""
        if isinstance(step, Pad):
            said += ", padded with zeros"
    return f"{said}."


_QUANTS = {
    "static": "fp8 by a given scale",
    "token": "fp8 with one scale per token",
    "group": "fp8 with one scale per `group_size` columns",
    "mxfp8": "fp8 with one exponent per 32 columns, MXFP8",
    "mxfp4": "fp4 with one exponent per 32 columns, MXFP4",
}


# ---- as source -------------------------------------------------------------------------------------------------------


def lines(chain: Sequence[Step], results: Sequence[Result]) -> Iterator[str]:
    """The chain as Python statements over `_all_reduce`, `_add`, `_norm`, `_gated_norm`, `_silu_mul`, `_quantise`, `_pad` and `_store`."""
    reads: dict[str, str] = {}
    main = quantised_step(chain)
    for step in chain:
        if isinstance(step, AllReduce):
            yield f"reduced_{step.x} = _all_reduce({step.x}, {step.group})"
            reads[step.x] = f"reduced_{step.x}"
        elif isinstance(step, Add):
            # What follows reads the sum where it would have read x.
            yield f"made_{step.out} = _add({reads.get(step.x, step.x)}, {step.residual})"
            reads[step.x] = f"made_{step.out}"
        elif isinstance(step, Norm):
            offset = "0.0" if step.weight_offset is None else step.weight_offset
            yield f"made_{step.out} = _norm({reads.get(step.x, step.x)}, {step.weight}, {step.epsilon}, {offset})"
        elif isinstance(step, GatedNorm):
            taken = (step.x, step.gate, step.weight, step.epsilon, step.weight_offset, step.activation)
            yield f"made_{step.out} = _gated_norm({', '.join(taken)}, {step.norm_before_gate})"
        elif isinstance(step, SiluMul):
            yield f"made_{step.out} = _silu_mul({step.gate}, {step.up}, {step.limit})"
        elif main is None:
            raise FusionError(f"{type(step).__name__} has nothing in front of it")
        elif isinstance(step, Pad):
            yield f"made_{step.out} = _pad(made_{main.out}, {step.width})"
        elif isinstance(step, Quant):
            # Heads are joined: what reads a gated norm quantises rows of all heads.
            values = f"made_{main.out}.flatten(-2)" if isinstance(main, GatedNorm) else f"made_{main.out}"
            yield f"{', '.join(f'made_{out}' for out in step.outs)} = {_quantisation(step, values)}"
    given = [
        f"_store(made_{result.name}, {result.of})" if isinstance(result, Like | Padded) else f"made_{result.name}"
        for result in results
    ]
    yield f"return {given[0]}" if len(given) == 1 else f"return ({', '.join(given)})"


def _quantisation(step: Quant, values: str) -> str:
    if step.per == "static":
        return f"_quantise_static({values}, {step.scale}, {step.dtype})"
    if step.mx:
        return f"_quantise_{step.per}({values})"
    if step.per == "token":
        return f"_quantise({values}, {step.dtype}, None, False, {step.use_ue8m0}, False)"
    aligned = "False" if step.tma_aligned is None else step.tma_aligned
    return f"_quantise({values}, {step.dtype}, {step.group_size}, {step.column_major}, {step.use_ue8m0}, {aligned})"


def written(
    name: str, chain: Sequence[Step], arguments: Sequence[Argument], results: Sequence[Result], how: Mapping[str, Any]
) -> Callable[..., Any]:
    """The chain as one function of all arguments by position. `how`: the functions that `lines` names.

    It is written out as source, since a compiler guards every object that it meets on the way through a loop over steps.
    """
    body = "\n    ".join(lines(chain, results))
    scope = dict(how)
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


__all__ = ["Reference", "lines", "op_of", "quantised_step", "written"]
