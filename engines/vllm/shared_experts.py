"""Shared experts, which vLLM runs behind an op of its own, so that no graph that it compiles shows their linears.

Few tokens are multiplied there by layerfuse too, in the place of their kernels' product, under the same conditions as in graphs (`inside`).
Where a dense MLP's silu * up would be quantised in the same launch, theirs is.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from ...adapters.linear_quant import activation_quant_of, quantiser_of
from ...adapters.specs import GatedMLPSpec
from ...fusion.planning import plan
from ..compiled_module import CompiledModule
from ..native import Native, NotNativeError, native_methods
from ..process import once
from ..standing import Standing
from ..whose import module_of
from . import inside
from .few_tokens import looks_inside
from .readers import PRODUCT
from .seams import SEAMS

CLASS = "vllm.model_executor.layers.fused_moe.runner.shared_experts", "SharedExperts"
TAKES = ("self", "A", "B", "As", "Bs")
"""What a kernel's product takes."""
LEFT = "layerfuse: the linears of shared experts are left to vLLM: %s"
GONE = "layerfuse: a linear of shared experts is vLLM's own from now on: %s"


def put_in(compiled: CompiledModule, module: nn.Module) -> None:
    """Let few tokens be layerfuse's in a module's shared experts, where its plan takes quantisations out of linears. Else it is said once why not."""
    if not looks_inside(compiled.plan):
        return
    mlps = [
        (site.layer, site.spec)
        for site in compiled.plan.sites
        if isinstance(site.spec, GatedMLPSpec) and site.experts is not None
    ]
    shared = [each for each in module.modules() if (type(each).__module__, type(each).__qualname__) == CLASS]
    shared += [module.get_submodule(path) for path, _ in mlps]
    linears = {id(each): each for around in shared for each in around.modules()}
    quants = ((each, activation_quant_of(each)) for each in linears.values())
    places = [(quantiser_of(each), quant.use_ue8m0) for each, quant in quants if quant is not None and quant.inside]
    if not places:
        return
    stood: list[Native] = []
    try:
        problem = inside.why_not() or _why_not(compiled, [place for place, _ in places])
        if problem is None:
            stood += [native_methods((place, PRODUCT)) for place, _ in places]
    except NotNativeError as error:
        problem = str(error)
    if problem is not None:
        once(logging.WARNING, LEFT, problem)
        return
    alone = plan(mlps, compiled.plan.target, compiled.plan.config, compiled.plan.engine)
    standing = Standing(compiled=attrs.evolve(compiled, plan=alone), model=module, seams=SEAMS)
    standing.put_in()
    # Of all layers together: they call the same op.
    compiled.aside = lambda: Counter(standing.forms[site] for site in standing.ran.elements())
    compiled.shared = len(places)
    for (place, powers_of_two), held in zip(places, stood, strict=True):
        if PRODUCT not in vars(place):  # else it takes what is quantised in front of it
            setattr(place, PRODUCT, _product(place, powers_of_two, held))


def _why_not(compiled: CompiledModule, places: list[Any]) -> str | None:
    """Why nothing of ours can stand in these kernels, as a sentence, or None."""
    if not hasattr(sys.modules.get(CLASS[0]), CLASS[1]):
        return f"this vLLM runs them otherwise than by {'.'.join(CLASS)}"
    if compiled.config.lora_config is not None:
        return "LoRA may add to them"
    for place in places:
        cls: Any = type(place)
        if cls.__module__ != inside.KERNELS:
            return f"{cls.__module__}.{cls.__qualname__} is no kernel of {inside.KERNELS}"
        takes = tuple(inspect.signature(getattr(cls, PRODUCT)).parameters)
        if takes != TAKES:
            return f"{cls.__qualname__}.{PRODUCT} takes {', '.join(takes)}, and not {', '.join(TAKES)}"
        if PRODUCT in vars(place):
            return f"{PRODUCT} of this {cls.__qualname__} is from {module_of(vars(place)[PRODUCT])}"
    return None


def _product(place: Any, powers_of_two: bool, stood: Native) -> Callable[..., Tensor]:
    """The product of one kernel."""
    cls: Any = type(place)

    def product(A: Tensor, B: Tensor, As: Tensor, Bs: Tensor) -> Tensor:  # noqa: N803 (named as vLLM names them)
        # Where a graph shows it after all, it holds vLLM's op, for our pass to find.
        if not torch.compiler.is_compiling():
            problem = stood.changed()
            if problem is not None:
                once(logging.WARNING, GONE, problem)
            elif inside.is_layerfuses(B, Bs, A):
                return inside.linear(A, B, Bs, powers_of_two)
        found: Tensor = getattr(cls, PRODUCT)(place, A, B, As, Bs)
        return found

    return product
