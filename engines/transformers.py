"""fp8 linears of transformers' own: few tokens are multiplied by layerfuse in the graphs of `fusion.compile`, more by transformers' kernels.

`FP8Linear` quantises what it reads inside of a kernel, DeepGEMM's or one of Triton's, which the `kernels` hub gives at the first call. It comes to
them by one function, `fp8_linear` (transformers/integrations/finegrained_fp8.py of 5.24). One of ours stands there: while Dynamo traces it,
the whole linear is one op that calls transformers' function, and a graph shows whose it is. Without a graph it is transformers' function.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..adapters.arguments import expect
from ..fusion.engine import Engine
from ..fusion.linear_ops import GROUP_QUANT_LINEAR
from ..fusion.match.calls import Call
from ..fusion.match.linears import READERS, FoundLinear, Reader, is_parameter
from ..fusion.match.provenance import PROJECTIONS
from ..fusion.match.values import value
from ..fusion.ops.linear import BLOCK, op_of
from . import trial
from .handover import why_products_apart
from .hooks import Hook, HookError, check
from .linears import UNFIT, fits
from .ops import define_op
from .transformers_facts import keeps
from .whose import is_source, module_of

MODULE, NAME = "transformers.integrations.finegrained_fp8", "fp8_linear"
TAKES = ("input", "weight", "weight_scale_inv", "block_size", "bias", "activation_scale", "allow_deepgemm")
FUNCTION = Hook(name=NAME, module=MODULE, path=NAME, takes=TAKES, others="none")
"""transformers' function."""

LINEAR = torch.ops.layerfuse.group_quant_linear.default
_COMPUTED = (torch.bfloat16, torch.float16)

_own: list[Callable[..., Tensor]] = []
"""transformers' function, once ours stands in its place."""


def _whole(allow_deepgemm: bool, x: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    return _own[0](x, weight, weight_scale, [BLOCK, BLOCK], None, None, allow_deepgemm)


def _fake(x: Tensor, weight: Tensor, _weight_scale: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _op(allow_deepgemm: bool) -> Any:
    name = NAME if allow_deepgemm else f"{NAME}_without_deepgemm"
    schema = f"{name}(Tensor x, Tensor weight, Tensor weight_scale) -> Tensor"
    return op_of(define_op("layerfuse_transformers", schema, partial(_whole, allow_deepgemm), _fake))


OPS = {allow_deepgemm: _op(allow_deepgemm) for allow_deepgemm in (True, False)}
"""A whole linear, by whether transformers may take DeepGEMM."""


def fp8_linear(
    input: Tensor,  # noqa: A002 (named as transformers names it)
    weight: Tensor,
    weight_scale_inv: Tensor,
    block_size: Any = None,
    bias: Tensor | None = None,
    activation_scale: Tensor | None = None,
    allow_deepgemm: bool = True,
) -> Tensor:
    """What stands in the place of transformers' function, and computes the same."""
    blocks = block_size is not None and tuple(block_size) == (BLOCK, BLOCK) and weight.dtype == torch.float8_e4m3fn
    # The flag itself: in torch 2.11 Dynamo takes `torch.compiler.is_exporting()` for true wherever it traces.
    traced = torch.compiler.is_compiling() and not torch.compiler._is_exporting_flag
    if not traced or not blocks or activation_scale is not None:
        return _own[0](input, weight, weight_scale_inv, block_size, bias, activation_scale, allow_deepgemm)
    made: Tensor = OPS[allow_deepgemm](input, weight, weight_scale_inv)
    return made if bias is None else made + bias


def _read(call: Call) -> FoundLinear | None:
    x, weight, weight_scale = call[0], call[1], call[2]
    rows = value(x)
    if not is_parameter(weight) or not is_parameter(weight_scale) or not fits(value(weight), value(weight_scale)):
        return None
    if rows.dtype.itemsize != 2 or rows.stride(-1) != 1:
        return None
    given = {"x": x, "weight": weight, "weight_scale": weight_scale, "steady": False, "beyond": call.name}
    return FoundLinear(out=call.node, ways={GROUP_QUANT_LINEAR.name: given}, nodes=(call.node,))


PROJECTIONS.update(dict.fromkeys(OPS.values(), 0))
READERS += [Reader(op=op._schema.name, gives=(GROUP_QUANT_LINEAR.name,), read=_read) for op in OPS.values()]


def engine_of(model: nn.Module) -> Engine:
    """What plans have to know of a model that transformers runs: with it its linears are sites, for fusions that are asked for by name.

    Each shape of its `FP8Linear`s is tried out once: transformers' function, and with it the kernel that the hub gives, against layerfuse's op.

    Args:
        model: as it will run, on its device. To be called before it is compiled. Any module will do, as a part of a model or a model of another
            library's that has linears of torch or torchao: nothing but its linears is looked at.

    Raises:
        ArgumentError: it is no module.
    """
    expect("model", model, nn.Module, "a model of transformers")
    module: Any = sys.modules.get(MODULE)
    every = () if module is None else model.named_modules(remove_duplicate=False)
    linears = {path: each for path, each in every if isinstance(each, module.FP8Linear)}
    problem = _why_not_stand(module) if linears else None
    tried: dict[Any, str | None] = {}
    # What the model computes in: its weights in fp8 do not say.
    dtype = next((each.dtype for each in model.parameters() if each.dtype in _COMPUTED), torch.bfloat16)
    left = {path: problem or _why_not(each, module, dtype, tried) for path, each in linears.items()}
    return Engine(
        name="transformers",
        linears={path: why for path, why in left.items() if why is not None},
        linears_apart=True,
        loaded=True,
        keeps=keeps() if linears else {},
    )


def _why_not_stand(module: Any) -> str | None:
    """Let ours stand in the place of transformers' function if that is the released one; else why not, as a sentence."""
    stands: Any = vars(module).get(NAME)
    if stands is fp8_linear:
        return None
    try:
        check(FUNCTION, module)
    except HookError as error:
        return str(error)
    if not is_source(stands.__code__, MODULE):
        return f"{FUNCTION.place} is from {module_of(stands)}"
    _own[:] = [stands]
    setattr(module, NAME, fp8_linear)
    return None


def _why_not(linear: Any, module: Any, dtype: torch.dtype, tried: dict[Any, str | None]) -> str | None:
    """Why a linear is transformers' with few tokens too, as a sentence, or None. `tried`: the same of each kind that was tried out."""
    if type(linear).forward is not module.FP8Linear.forward:
        return f"the forward of its class, {type(linear).__qualname__}, is another than FP8Linear's"
    weight, weight_scale = linear.weight, linear.weight_scale_inv
    if not fits(weight, weight_scale) or linear.activation_scale is not None:
        return UNFIT
    if weight.is_meta:
        return "its weight is not loaded, so that what runs there cannot be tried out"
    key = weight.shape, weight.device, linear._deepgemm_disabled
    if key not in tried:
        tried[key] = _difference(weight, weight_scale, dtype, not linear._deepgemm_disabled)
    return tried[key]


def _difference(weight: Tensor, weight_scale: Tensor, dtype: torch.dtype, allow_deepgemm: bool) -> str | None:
    """Call transformers' function and ours on random rows of a dtype: how they differ, as a sentence, or None."""
    x = trial.random(weight.new_empty(trial.ROWS, weight.shape[1], dtype=dtype))
    try:
        with torch.no_grad():
            theirs = _whole(allow_deepgemm, x, weight, weight_scale)
            ours = LINEAR(x, weight, weight_scale, False, False, "")
    except Exception as error:  # of anybody's
        return trial.raised(error)
    if theirs.dtype != ours.dtype:
        return f"what runs there gives {theirs.dtype} for rows of {dtype}"
    return why_products_apart(theirs, ours)
