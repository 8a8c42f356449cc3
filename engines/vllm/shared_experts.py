"""Shared experts, which vLLM runs behind an op of its own, so that no graph that it compiles shows their linears.

Few tokens are multiplied there by layerfuse too, in the place of their kernels' product, where the plan expects it. Where a dense MLP's
silu * up would be quantised in the same launch, theirs is.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from ...adapters.linear_quant import kernel_of
from ...adapters.specs import GatedMLPSpec
from ...fusion.catalog.few_token_linear import BLOCKS
from ...fusion.planning import plan
from ...fusion.rewrite.attribution import join
from ...fusion.sites import Site
from ..compiled_module import CompiledModule
from ..linears import AtSeams
from ..native import Native, NotNativeError, native_methods
from ..placement import Put
from ..process import once
from ..standing import Standing
from ..whose import kind_of, module_of
from . import inside
from .hooks import SHARED
from .readers import PRODUCT
from .seams import SEAMS

CLASS = "vllm.model_executor.layers.fused_moe.runner.shared_experts", "SharedExperts"
GONE = "layerfuse: a linear of shared experts is vLLM's own from now on: %s"


class AtSharedExperts(Standing):
    """Silu * up of shared experts, which is no site of the plan where a graph would have to show it."""

    def uses(self, run: str) -> Iterator[Any]:  # noqa: ARG002 (of no run)
        """None."""
        return iter(())

    def told(self, counted: Counter[str]) -> Counter[str]:
        """All calls but its own."""
        return counted - sum(self.ran.values(), Counter())


def put_in(compiled: CompiledModule, module: nn.Module) -> None:
    """Let few tokens be layerfuse's where the plan expects that and no graph shows it: in shared experts, and in a model that is not compiled."""
    kernels = expect_products(compiled, module)
    shared = [site for name in kernels if (site := compiled.plan.site[name]).experts is not None]
    if shared:
        _stand(compiled, module, shared, kernels)


def expect_products(compiled: CompiledModule, module: nn.Module) -> dict[str, Any]:
    """Let the products of the plan that no graph shows be layerfuse's, and count them.

    Returns:
        Site -> vLLM's kernel.
    """
    found = [compiled.plan.site[each.site] for each in compiled.plan.expected(BLOCKS)]
    kernels = {
        site.name: kernel_of(module.get_submodule(join(site.layer, site.linear.path)))
        for site in found
        if site.linear is not None and (site.experts is not None or compiled.at_modules is not None)
    }
    counts = {name: inside.ran.setdefault(kernel, Counter()) for name, kernel in kernels.items()}
    if counts:
        compiled.placements[BLOCKS] = AtSeams(fusion=BLOCKS, counts=counts)
    return kernels


def _stand(compiled: CompiledModule, module: nn.Module, sites: list[Site], kernels: dict[str, Any]) -> None:
    """Stand at the products of shared experts' kernels, and at their silu * up, but where the plan's own chains stand: they are called by themselves there."""
    mlps = [
        (site.layer, site.spec)
        for site in compiled.plan.sites
        if isinstance(site.spec, GatedMLPSpec) and site.experts is not None and site.linear is None
        if not any(decision.applies for decision in compiled.plan.at(site.name))
    ]
    sites = [site for site in sites if not site.handed_over]
    stood = {site.name: native_methods((kernels[site.name], PRODUCT)) for site in sites}
    alone = plan(mlps, compiled.plan.target, compiled.plan.config, compiled.plan.engine)
    standing = AtSharedExperts(compiled=attrs.evolve(compiled, plan=alone), model=module, seams=SEAMS)
    standing.put_in()
    compiled.placements["shared experts"] = standing
    for held, _ in standing.forwards.values():
        _but_for(compiled.untouched, held, "forward")
    for site in sites:
        kernel = kernels[site.name]
        if PRODUCT not in vars(kernel):  # else it takes what is quantised in front of it
            setattr(
                kernel, PRODUCT, _product(kernel, site.quant is not None and site.quant.use_ue8m0, stood[site.name])
            )
            standing.put.append(Put.at(kernel, PRODUCT))
        _but_for(compiled.untouched, kernel, PRODUCT)


def _but_for(untouched: range, held: Any, name: str) -> None:
    """Let what stands at an instance be called but for these numbers of tokens, for which its class's own is; and of its copies alone."""
    ours = vars(held)[name]

    def either(self: Any, *args: Any, **kwargs: Any) -> Any:
        rows = args[0] if args else next(iter(kwargs.values()))
        if self is not held or (not torch.compiler.is_compiling() and len(rows) in untouched):
            return getattr(type(self), name)(self, *args, **kwargs)
        return ours(*args, **kwargs)

    if untouched:
        vars(held)[name] = MethodType(either, held)


def why_not(vllm_config: Any, kernel: Any) -> str | None:
    """Why nothing of ours can stand in a kernel of shared experts, as a sentence, or None."""
    cls: Any = type(kernel)
    if not hasattr(sys.modules.get(CLASS[0]), CLASS[1]):
        return f"this vLLM runs them otherwise than by {'.'.join(CLASS)}"
    if vllm_config.lora_config is not None:
        return "LoRA may add to them"
    if cls.__module__ != inside.KERNELS:
        return f"{'.'.join(kind_of(cls))} is no kernel of {inside.KERNELS}"
    takes = tuple(inspect.signature(getattr(cls, PRODUCT)).parameters)
    if takes != SHARED.takes:
        return f"{cls.__qualname__}.{PRODUCT} takes {', '.join(takes)}, and not {', '.join(SHARED.takes)}"
    if PRODUCT in vars(kernel):
        return f"{PRODUCT} of this {cls.__qualname__} is from {module_of(vars(kernel)[PRODUCT])}"
    try:
        native_methods((kernel, PRODUCT))
    except NotNativeError as error:
        return str(error)
    return None


def _product(kernel: Any, powers_of_two: bool, stood: Native) -> Callable[..., Tensor]:
    """The product of one kernel."""
    cls: Any = type(kernel)

    def product(A: Tensor, B: Tensor, As: Tensor, Bs: Tensor) -> Tensor:  # noqa: N803 (named as vLLM names them)
        # Where a graph shows it after all, it holds vLLM's op, for our pass to find.
        if not torch.compiler.is_compiling():
            problem = stood.changed()
            if problem is not None:
                once(logging.WARNING, GONE, problem)
            elif inside.is_layerfuses(B, Bs, A):
                return inside.linear(kernel, A, B, Bs, powers_of_two)
        found: Tensor = getattr(cls, PRODUCT)(kernel, A, B, As, Bs)
        return found

    return product
