"""fp8 products in blocks inside SGLang: few tokens are multiplied by layerfuse, more by SGLang's own.

A `Fp8LinearMethod` holds the function that multiplies, which it chose when it was made (sglang/srt/layers/quantization/fp8_utils.py of 0.5.23): it
is given bfloat16, or what was quantised before and its scales. One of ours stands there. DeepGEMM on Hopper, and Triton, read float32 scales that
are not rounded to powers of two; what SGLang packs for Blackwell is left to it.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...adapters.activation_quant import ActivationQuant
from ...fusion.catalog.few_token_linear import BLOCKS
from ...fusion.linear_ops import MOST
from ...fusion.ops.linear import BLOCK
from ...fusion.ops.quantisation import quantise
from ...fusion.rewrite.attribution import join
from .. import trial
from ..compiled_module import CompiledModule
from ..handover import why_products_apart
from ..hooks import HookError, check
from ..linears import UNFIT, AtSeams, fits
from ..native import Native, NotNativeError, native_function
from ..ops import define_op
from ..placement import Put, is_looked_at
from ..process import once
from ..whose import kind_of, module_of
from .hooks import PRODUCTS
from .switches import ASKS, QUANT_ONCE, is_set

MODULE = PRODUCTS[0].module
OWN = {hook.path: hook for hook in PRODUCTS}
"""SGLang's functions that ours can stand for, by name."""
PLACE = "w8a8_block_fp8_linear"
"""Where a linear method holds its function."""
METHOD = "sglang.srt.layers.quantization.fp8", "Fp8LinearMethod"
LEFT = "layerfuse: fp8 linears are left to SGLang for few tokens: %s"
GONE = "layerfuse: fp8 linears are SGLang's own from now on: %s"

LINEAR = torch.ops.layerfuse.group_quant_linear.default
BLOCK_LINEAR = torch.ops.layerfuse.block_scaled_linear.default

_left_out: ContextVar[bool] = ContextVar("layerfuse_left_out", default=False)


def _more(name: str, x: Tensor, scales: Tensor | None, weight: Tensor, weight_scale: Tensor) -> Tensor:
    found: Tensor = vars(sys.modules[MODULE])[name](
        input=x, weight=weight, block_size=[BLOCK, BLOCK], weight_scale=weight_scale, input_scale=scales
    )
    return found


def _plain(name: str, x: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    return _more(name, x, None, weight, weight_scale)


def _beyond(name: str) -> tuple[str, str]:
    """Two ops for more tokens than few, by name: of quantised rows, and of others."""
    short, weights = name.partition("_")[0], "Tensor weight, Tensor weight_scale) -> Tensor"
    product = f"block_product_{short}(Tensor values, Tensor scales, {weights}"
    linear = f"block_linear_{short}(Tensor x, {weights}"
    return (
        define_op("layerfuse_sglang", product, partial(_more, name)),
        define_op("layerfuse_sglang", linear, partial(_plain, name)),
    )


BEYOND = {name: _beyond(name) for name in OWN}
"""By the name of SGLang's function."""


@contextmanager
def left_out() -> Iterator[None]:
    """Let all products be SGLang's own while this lasts."""
    before = _left_out.set(True)
    try:
        yield
    finally:
        _left_out.reset(before)


def put_in(compiled: CompiledModule, model: nn.Module) -> None:
    """Let few tokens be layerfuse's where a model's plan expects that."""
    found = [compiled.plan.site[each.site] for each in compiled.plan.expected(BLOCKS)]
    if not found:
        return
    ran: dict[str, Counter[str]] = {}
    left: dict[str, str] = {}
    stood: dict[str, Native] = {}
    tried: dict[Any, str | None] = {}
    put: list[Put] = []
    for site in found:
        assert site.linear is not None, "the fusion is of linears"
        linear = model.get_submodule(join(site.layer, site.linear.path))
        ran[site.name] = Counter()
        miss = partial(left.__setitem__, site.name)
        before = {**vars(linear.quant_method)}
        problem = _stand(linear, site.quant, compiled, ran[site.name], stood, tried, miss)
        if problem is None:
            put.append(Put.at(linear.quant_method, PLACE, before))
        else:
            left[site.name] = problem
            once(logging.WARNING, LEFT, problem)
    compiled.placements[BLOCKS] = AtSeams(fusion=BLOCKS, missed=left, counts=ran, put=put)


def why_not(arguments: Any) -> str | None:
    """Why no linear of an SGLang that is started with these arguments can be layerfuse's, as a sentence, or None."""
    if arguments.enable_lora or (arguments.enable_lora is None and arguments.lora_paths):
        return "LoRA may add to it"
    return ASKS if is_set(QUANT_ONCE) else None


def why_not_by(linear: Any, quant: ActivationQuant, known: dict[str, str | None]) -> str | None:
    """Why a linear that quantises what it reads cannot be, as a sentence, or None. `known`: the same of SGLang's functions, as they are looked at."""
    method: Any = linear.quant_method
    if kind_of(method) != METHOD or not method.block_quant:
        return f"no product of {type(method).__qualname__} is known here"
    own = vars(method)[PLACE]
    name = own.__name__ if module_of(own) == MODULE else ""
    if name not in OWN or vars(sys.modules[MODULE])[name] is not own:
        return f"{PLACE} of this {METHOD[1]} is from {module_of(own)}"
    if quant.use_ue8m0:
        return "the scales of what it reads are rounded to powers of two"
    if not fits(*_weight(linear)):
        return UNFIT
    if linear._parameters.get("bias") is not None:
        return "it has a bias"
    if name not in known:
        known[name] = _why_not_own(name)
    return known[name]


def _why_not_own(name: str) -> str | None:
    try:
        check(OWN[name], sys.modules[MODULE])
        native_function(MODULE, name)
    except (HookError, NotNativeError) as error:
        return str(error)
    return None


def _weight(linear: Any) -> tuple[Any, Any]:
    return linear._parameters.get("weight"), linear._parameters.get("weight_scale_inv")


def _stand(
    linear: Any,
    quant: Any,
    compiled: CompiledModule,
    ran: Counter[str],
    stood: dict[str, Native],
    tried: dict[Any, str | None],
    miss: Callable[[str], None],
) -> str | None:
    """Let a linear's few tokens be layerfuse's, or say why not."""
    method, (weight, weight_scale) = linear.quant_method, _weight(linear)
    own = vars(method)[PLACE]
    if own.__name__ not in stood:
        stood[own.__name__] = native_function(MODULE, own.__name__)
    # The same code for all weights of a shape.
    key = own.__name__, weight.shape, weight.device
    if key not in tried:
        tried[key] = _difference(own, weight, weight_scale, quant)
    if tried[key] is None:
        setattr(method, PLACE, _product(own, compiled, ran, Native.of_all([stood[own.__name__]]), miss))
    return tried[key]


def _difference(own: Callable[..., Tensor], weight: Tensor, weight_scale: Tensor, quant: ActivationQuant) -> str | None:
    """Call SGLang's function and ours on random rows, which makes ours ready for CUDA graphs: how they differ, as a sentence, or None."""
    x = trial.random(weight.new_empty(trial.ROWS, weight.shape[1], dtype=torch.bfloat16))
    try:
        with torch.no_grad():
            values, scales = quantise(x.float(), weight.dtype, BLOCK, quant.column_major, False, quant.tma_aligned)
            theirs = partial(own, weight=weight, block_size=[BLOCK, BLOCK], weight_scale=weight_scale)
            ours = LINEAR(x, weight, weight_scale, False, True, "")
            ours_given = BLOCK_LINEAR(values, scales, weight, weight_scale, torch.bfloat16, True, "")
            pairs = [(theirs(input=x), ours), (theirs(input=values, input_scale=scales), ours_given)]
    except Exception as error:  # of anybody's
        return trial.raised(error)
    return next(filter(None, (why_products_apart(*pair) for pair in pairs)), None)


def _product(
    own: Callable[..., Tensor], compiled: CompiledModule, ran: Counter[str], stood: Native, miss: Callable[[str], None]
) -> Callable[..., Tensor]:
    """What stands for SGLang's function; `ran` counts calls of layerfuse's ops, `miss` is told why none is called any more."""
    block_product, block_linear = BEYOND[own.__name__]

    @functools.wraps(own)
    def product(
        input: Any,  # noqa: A002 (named as SGLang names it)
        weight: Any,
        block_size: Any,
        weight_scale: Any,
        input_scale: Any = None,
        bias: Any = None,
        **more: Any,
    ) -> Tensor:
        def theirs() -> Tensor:
            return own(input, weight, block_size, weight_scale, input_scale, bias, **more)

        # Until the first run is over the op is called with any number of tokens, for its count.
        many = input.shape[:-1].numel() > MOST and compiled.counted is not None
        if many or bias is not None or more or _left_out.get() or torch.compiler.is_compiling():
            return theirs()
        if input.stride(-1) != 1 or not fits(weight, weight_scale):
            return theirs()
        problem = stood.changed()
        if problem is not None:
            miss(problem)
            once(logging.WARNING, GONE, problem)
            return theirs()
        made: Tensor
        if input_scale is None and input.dtype == torch.bfloat16:
            ran[LINEAR._opname] += is_looked_at()
            made = LINEAR(input, weight, weight_scale, False, True, block_linear)
        elif input_scale is not None and input_scale.dtype == torch.float32:
            ran[BLOCK_LINEAR._opname] += is_looked_at()
            made = BLOCK_LINEAR(input, input_scale, weight, weight_scale, torch.bfloat16, True, block_product)
        else:
            made = theirs()
        return made

    # By these SGLang, adapters and checks of other places know whose function it stands for.
    vars(product).update(func=own, __layerfuse_original__=own)
    return product
