"""The bindings of the norms that do not quantise to fp8, and of those that quantise in blocks of 32 (MX)."""

from __future__ import annotations

from . import functions as known
from .conventions import Binding

NORM_BINDINGS: tuple[Binding, ...] = (
    Binding(name="add_rms_norm", calls="norms.add_rms_norm", functions=(known.ADD_NORM,), adds=True),
    Binding(
        name="add_rms_norm.triton",
        calls="triton_norms.add_rms_norm",
        functions=known.TRITON_ADD_PAD,
        kind="triton",
        adds=True,
    ),
    Binding(
        name="add_rms_norm_pad",
        calls="triton_norms.add_rms_norm_pad",
        functions=known.TRITON_ADD_PAD,
        kind="triton",
        adds=True,
    ),
    Binding(name="rms_norm_mxfp8_quant", calls="mx.hip_mxfp8", functions=(known.NORM_QUANT,)),
    Binding(
        name="rms_norm_mxfp8_quant.triton",
        calls="mx.triton_mxfp8",
        functions=known.TRITON_MXFP8_QUANT,
        kind="triton",
    ),
    Binding(name="add_rms_norm_mxfp8_quant", calls="mx.hip_mxfp8", functions=(known.ADD_NORM_QUANT,), adds=True),
    *(
        Binding(
            name=f"{'add_' if adds else ''}rms_norm_mxfp4_quant{'_with_norm' if keeps_norm else ''}",
            calls="mx.triton_mxfp4",
            functions=known.TRITON_MXFP4_KEPT if keeps_norm else known.TRITON_MXFP4_QUANT,
            kind="triton",
            adds=adds,
            keeps_norm=keeps_norm,
        )
        for adds in (False, True)
        for keeps_norm in (False, True)
    ),
)
