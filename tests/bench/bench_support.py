"""Widths small enough for a CPU, and a fusion that no catalog file declares."""

from layerfuse.bench import Peer
from layerfuse.bench.cases import forms
from layerfuse.fusion import Fusion
from layerfuse.fusion.chain import Add, Norm, Quant
from layerfuse.fusion.declare import (
    COLUMN_MAJOR,
    UE8M0,
    Epsilon,
    GroupSize,
    Like,
    Op,
    QuantDtype,
    Quantised,
    Rows,
    Scales,
    Weight,
    WeightOffset,
)
from layerfuse.fusion.sites import INPUT, POST_ATTENTION

OURS = "layerfuse (reference)"
ALL = sorted(forms())
QUANTS = [name for name in ALL if name.endswith(("_quant", "_quant_with_norm"))]
DUAL_QUANTS = ["mla_dual_rms_norm_group_quant", "mla_dual_rms_norm_per_token_quant"]


def widths_for(fusion):
    """256 columns, then 128; latents have 16 columns after them in a row."""
    widths = (256, 128)[: len(forms()[fusion][1].op.widths)] if fusion in forms() else (256,)
    return (*widths, 16) if len(widths) == 2 else widths


def _reference(x, residual, weight, epsilon, offset, dtype, group_size, column_major, use_ue8m0):
    from layerfuse.fusion.ops.norm import normalise_wide
    from layerfuse.fusion.ops.quantisation import quantise

    wide = x.float() + residual
    values, scales = quantise(normalise_wide(wide, weight, epsilon, offset), dtype, group_size, column_major, use_ue8m0)
    return values, scales, wide.to(x.dtype)


ANOTHER = Fusion(
    name="another_packages_add_norm_quant",
    doc="what a third party might add: a residual add, a norm and a quantisation, with names of its own",
    level=2,
    roles=(INPUT, POST_ATTENTION),
    chain=(
        Add(x="hidden", residual="stream", out="stream"),
        Norm(x="hidden", weight="gamma", epsilon="eps", weight_offset="shift", out="normed"),
        Quant(per="group", out="low", scales="factors", tma_aligned=None),
    ),
    op=Op(
        name="another_packages_add_norm_quant",
        doc="The norm of a sum, in fp8.",
        args=(
            Rows(name="hidden", width="hidden_size"),
            Rows(name="stream", width="hidden_size", like="hidden"),
            Weight(name="gamma", of="hidden"),
            Epsilon(name="eps"),
            WeightOffset(name="shift"),
            QuantDtype(),
            GroupSize(),
            COLUMN_MAJOR,
            UE8M0,
        ),
        results=(
            Quantised(name="low", of="hidden"),
            Scales(name="factors", of="hidden"),
            Like(name="stream", of="hidden"),
        ),
        reference=_reference,
    ),
    owner="somebody-elses-package",
)


def peer_of(name, build):
    """A peer that is always here."""
    return Peer(name=name, about="a test's", why_not=lambda _: None, build=build)
