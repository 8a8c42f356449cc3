"""Linears with few tokens, whose product waits for its weights: one launch that shares out the depth, with the quantisation in front of it.

Their places are in engines alone (`Engine.linears`; of transformers' models `engines.transformers.engine_of` says them), where one op holds for any
number of tokens: more than few are the engine's own product.
"""

from __future__ import annotations

from ...adapters.linear_specs import weight_spec
from ...adapters.specs import ExpertsSpec
from ..chain import Experts, Fusion, Linear, TokenLimit
from ..engine import Engine
from ..linear_ops import (
    BLOCK_SCALED_EXPERTS,
    BLOCK_SCALED_LINEAR,
    FEW_TOKEN_LINEAR,
    GROUP_QUANT_LINEAR,
    LARGE,
    LARGE_BLOCKS,
    MOST,
    SCALED_LINEAR,
)
from ..sites import EXPERTS, LINEAR, Site
from ..target import Target

TIMED = "sm90"
"""Where the kernels for quantised weights were timed beside an engine's."""

ELSEWHERE = f"its kernel was timed on {TIMED} alone, so that it may be slower than the engine's elsewhere"

PLAIN, BLOCKS, ROWS = "few_token_linear", "few_token_linear_group_quant", "few_token_linear_row_quant"
"""The fusions of linears by the weights that they read."""

ROUTED, FEW = "few_token_experts_group_quant", 2
"""That of routed experts, and up to how many tokens it is faster than vLLM's kernels (bench/results/few_token_experts-nvidia-h100.json)."""
NARROW = 768
"""So many columns between an expert's products, of all tokens together, up to which it is (bench/results/few_token_experts-nvidia-h200.json)."""

HIDDEN = f"shared experts run beside routed ones, and are done before those of more than {NARROW} columns: faster, they would only hold up the router"
"""vLLM runs shared experts beside the router and the routed ones: with 2048 columns the router took 10 us of 5, and a step 1.004 to 1.008 of vLLM's
(bench/results/vllm_engine_torch_2_14-nvidia-h100.json, `deepseek-v3-dp-mixture`)."""

IN_BLOCKS = (weight_spec("float8_e4m3fn", "block", (128, 128)),)


def limit(site: Site, _target: Target, engine: Engine | None) -> TokenLimit:
    """Few tokens, or none where the engine shows nobody the product."""
    why = _why_left(site, engine)
    if why is not None:
        return TokenLimit(most=0, reason=why)
    return TokenLimit(most=MOST, reason="more tokens are the engine's own product, which is as fast or faster then")


def timed_limit(site: Site, target: Target, engine: Engine | None) -> TokenLimit:
    """The same, on the GPU that was timed; but for shared experts that run beside wide routed ones, which vLLM does on another stream."""
    if not _was_timed(target):
        return TokenLimit(most=0, reason=ELSEWHERE)
    if site.experts is not None and not tokens_of(site.experts) and not _in_turn(engine):
        return TokenLimit(most=0, reason=HIDDEN)
    return limit(site, target, engine)


def experts_limit(site: Site, target: Target, _engine: Engine | None) -> TokenLimit:
    """One token or two, by how wide the experts are."""
    if not _was_timed(target):
        return TokenLimit(most=0, reason=ELSEWHERE)
    most = tokens_of(site.experts)
    why = "more tokens are the engine's own kernels', which are faster then"
    if not most:
        why = f"with more than {NARROW} columns between an expert's products the engine's own kernels are faster"
    return TokenLimit(most=most, reason=why, how="where vLLM multiplies them by its Triton kernels" if most else "")


def tokens_of(experts: ExpertsSpec | None) -> int:
    """Up to how many tokens a rank's routed experts are layerfuse's, by how wide they are, where that is known."""
    columns = None if experts is None else experts.local_intermediate_size
    return FEW if columns is None else min(FEW, NARROW // columns)


def _in_turn(engine: Engine | None) -> bool:
    """Whether shared experts run before or behind the routed ones, so that both are waited for."""
    return engine is not None and (engine.name == "transformers" or engine.shared_apart or engine.shared_in_turn)


def _was_timed(target: Target) -> bool:
    return target.arch == TIMED or not target.arch.startswith(("sm", "gfx"))


def _why_left(site: Site, engine: Engine | None) -> str | None:
    """Why the engine shows nobody the product, as a sentence, or None."""
    if engine is None:
        return "there is a place for it in engines alone"
    inside = site.quant is not None and site.quant.inside
    if inside and engine.inside is not None:
        return f"it quantises inside of the op that multiplies, and nothing takes that out in {engine.name}: {engine.inside}"
    # Shared experts that quantise inside of their product have a seam there.
    shared_apart = engine.shared_apart or engine.linears_apart
    if site.experts is not None and engine.experts is not None and not inside and not shared_apart:
        return engine.experts
    # So has a linear that a chain in front gives what it has quantised.
    apart = engine.linears_apart or (inside and (site.handed_over or site.experts is not None))
    if engine.uncompiled is not None and not apart:
        return (
            f"{engine.uncompiled}; at module level there is a place for it behind a chain that quantises for it alone"
        )
    return None


FUSIONS = (
    Fusion(
        name=PLAIN,
        doc="one kernel for a linear of bfloat16 or float16, for up to 16 tokens",
        level=1,
        roles=(LINEAR,),
        chain=(
            Linear(
                op=FEW_TOKEN_LINEAR,
                weights=tuple(weight_spec(dtype, "plain", None) for dtype in ("bfloat16", "float16")),
            ),
        ),
        limit=limit,
        opt_in=True,
    ),
    Fusion(
        name=BLOCKS,
        doc="one kernel for a linear of fp8 in blocks of 128 x 128 and the quantisation in front of it, for up to 16 tokens",
        level=2,
        roles=(LINEAR,),
        chain=(
            Linear(
                op=GROUP_QUANT_LINEAR,
                behind=BLOCK_SCALED_LINEAR,
                weights=IN_BLOCKS,
                schemes=("group",),
                group_size=128,
                fewer=LARGE_BLOCKS,
                goes_with="group",
            ),
        ),
        limit=timed_limit,
    ),
    Fusion(
        name=ROUTED,
        doc="two launches for the routed experts of a mixture of fp8 in blocks of 128 x 128, for one token or two",
        level=2,
        roles=(EXPERTS,),
        chain=(
            Experts(op=BLOCK_SCALED_EXPERTS, weights=IN_BLOCKS, schemes=("group",), group_size=128, goes_with=BLOCKS),
        ),
        limit=experts_limit,
    ),
    Fusion(
        name=ROWS,
        doc="one kernel for the product of an fp8 linear with scales of tokens and channels, or one for all, for up to 16 tokens",
        level=1,
        roles=(LINEAR,),
        chain=(
            Linear(
                op=SCALED_LINEAR,
                weights=tuple([weight_spec("float8_e4m3fn", scheme, None) for scheme in ("channel", "tensor")]),
                schemes=("per_token", "static"),
                fewer=LARGE,
            ),
        ),
        limit=limit,
        opt_in=True,
    ),
)
