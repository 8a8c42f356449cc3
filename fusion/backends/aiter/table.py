"""The bindings: which function of AITER's serves which op, and what puts our convention over it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from attrs import frozen

from ...formats import FORMATS, FP8
from . import functions as f
from .matching import Function
from .releases import ReleaseRange


@frozen
class Binding:
    """One call of ours and the function of AITER's that answers it."""

    name: str
    "An op's name, with a suffix where the op has several bindings: `rms_norm_group_quant.triton`. Else a call of ours."
    calls: str
    "`module.function` in this package: from what was found to the callable with our convention."
    function: Function

    @property
    def op(self) -> str:
        """The op that it serves."""
        return self.name.partition(".")[0]

    @property
    def adds(self) -> bool:
        """Whether a residual is added first."""
        return self.op.startswith("add_")

    @property
    def is_dual(self) -> bool:
        """Whether it is of an MLA layer's two latents."""
        return self.op.startswith("mla_dual_")

    @property
    def keeps_norm(self) -> bool:
        """Whether the norm is returned unquantised too."""
        return self.op.endswith("_with_norm")

    @property
    def per(self) -> str:
        """The word of the plain fp8 format that it quantises to; `none`: it does not quantise, or in MX blocks."""
        return next((word for word in FP8 if f"_{FORMATS[word].scheme}_quant" in self.op), "none")


@frozen(kw_only=True)
class Resolved:
    """A function of AITER's, imported, with what is known of it. Everything here is asked once, when binding."""

    binding: Binding
    function: Callable[..., Any]
    names: frozenset[str]
    "The recorded parameters that it has; what else it may take has no known meaning."
    releases: ReleaseRange
    "What the build can be."

    @property
    def name(self) -> str:
        """The binding's."""
        return self.binding.name


B = Binding


def _quantised() -> Iterator[B]:
    """The norms that quantise to fp8, in order of preference: the kernel made for it, the kernel of the latents, Triton."""
    for add, single in (("", f.NORM_QUANT), ("add_", f.ADD_NORM_QUANT)):
        for kept in ("", "_with_norm"):
            for per, latents in (("per_token", f.LATENT_TOKEN_QUANT), ("group", f.LATENT_GROUP_QUANT)):
                name = f"{add}rms_norm_{per}_quant{kept}"
                if not kept:  # AITER's kernel made for a single norm gives no plain one
                    yield B(name, "norm_quant.hip", single)
                yield B(f"{name}.latents", "norm_quant.latents", latents)
                yield B(f"{name}.triton", "norm_quant.triton", f.TRITON_GROUP_QUANT)
            yield B(f"{add}rms_norm_static_quant{kept}", "norm_quant.triton_static", f.TRITON_STATIC_QUANT)


def _latents() -> Iterator[B]:
    """The norms of an MLA layer's two latents."""
    yield B("mla_dual_rms_norm", "norms.dual_rms_norm", f.LATENT_NORMS)
    for kept in ("", "_with_norm"):
        for per, hip in (("per_token", f.LATENT_TOKEN_QUANT), ("group", f.LATENT_GROUP_QUANT)):
            name = f"mla_dual_rms_norm_{per}_quant{kept}"
            yield B(name, "norm_quant.latents", hip)
            yield B(f"{name}.triton", "norm_quant.triton", f.TRITON_GROUP_QUANT)
        yield B(f"mla_dual_rms_norm_static_quant{kept}", "norm_quant.triton_static", f.TRITON_STATIC_QUANT)


BINDINGS: tuple[B, ...] = (
    B("add_rms_norm", "norms.add_rms_norm", f.ADD_NORM),
    B("add_rms_norm.triton", "norms.triton_add_rms_norm", f.TRITON_ADD_PAD),
    B("add_rms_norm_pad", "norms.triton_add_rms_norm_pad", f.TRITON_ADD_PAD),
    B("rms_norm_mxfp8_quant", "norm_quant.hip", f.NORM_QUANT),
    B("rms_norm_mxfp8_quant.triton", "norm_quant.triton_mxfp8", f.TRITON_MXFP8_QUANT),
    B("add_rms_norm_mxfp8_quant", "norm_quant.hip", f.ADD_NORM_QUANT),
    *(
        B(f"{add}rms_norm_mxfp4_quant{kept}", "norm_quant.triton_mxfp4", f.TRITON_MXFP4_QUANT)
        for add in ("", "add_")
        for kept in ("", "_with_norm")
    ),
    *_quantised(),
    *_latents(),
    B("gated_rms_norm_per_token_quant", "gated.hip_per_token", f.GATED_TOKEN_QUANT),
    B("gated_rms_norm_group_quant", "gated.hip_group", f.GATED_GROUP_QUANT),
    B("gated_rms_norm_group_quant.triton", "gated.triton_group", f.TRITON_GATED_QUANT),
    B("silu_mul_static_quant", "silu_mul.triton_static", f.TRITON_SILU_STATIC_QUANT),
    B("silu_mul_per_token_quant.clamp", "silu_mul.clamp", f.TRITON_CLAMP_QUANT),
    B("silu_mul_per_token_quant.triton", "silu_mul.triton", f.TRITON_ACT_QUANT),
    B("silu_mul_group_quant", "silu_mul.hip_group", f.SILU_QUANT),
    B("silu_mul_group_quant.clamp", "silu_mul.clamp", f.TRITON_CLAMP_QUANT),
    B("silu_mul_group_quant.triton", "silu_mul.triton", f.TRITON_ACT_QUANT),
    B("mla_metadata_info", "mla.metadata_info", f.METADATA_INFO),
    B("mla_metadata", "mla.metadata", f.METADATA),
    B("mla_decode", "mla.decode", f.DECODE),
    B("all_reduce_add_rms_norm", "all_reduce.norm", f.FUSED_AR),
    B("all_reduce_add_rms_norm_pad", "all_reduce.norm_pad", f.FUSED_AR),
    *(
        B(f"all_reduce_add_rms_norm_{form}{kept}", f"all_reduce.{calls}", function)
        for form, calls, function in (
            ("per_token_quant", "per_token", f.FUSED_AR),
            ("group_quant", "per_group", f.FUSED_AR_GROUP),
        )
        for kept in ("", "_with_norm")
    ),
)
"""All bindings, in the order in which the docs and the doctor list them, and the ops ask them."""

BY_NAME = {binding.name: binding for binding in BINDINGS}


def candidates(op: str) -> tuple[Binding, ...]:
    """The bindings that can serve an op, the preferred one first; none where AITER has nothing for it."""
    return tuple(binding for binding in BINDINGS if binding.op == op)


def calling(*makers: str) -> tuple[str, ...]:
    """The names of the bindings that these functions of this package put over AITER's, in the order of the table."""
    return tuple(binding.name for binding in BINDINGS if binding.calls in makers)
