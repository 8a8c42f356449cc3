"""The bindings of the norms of an MLA layer's two latents."""

from __future__ import annotations

from collections.abc import Iterator

from . import functions as known
from .conventions import Binding


def _bindings() -> Iterator[Binding]:
    yield Binding(name="mla_dual_rms_norm", calls="dual_norms.mla_dual_rms_norm", functions=known.LATENT_NORMS)
    for keeps_norm in (False, True):
        suffix = "_quant_with_norm" if keeps_norm else "_quant"
        for per, hip in (("per_token", known.LATENT_TOKEN_QUANT), ("group", known.LATENT_GROUP_QUANT)):
            name = f"mla_dual_rms_norm_{per}{suffix}"
            yield Binding(name=name, calls=f"dual_norms.hip_{per}", functions=(hip,), keeps_norm=keeps_norm)
            yield Binding(
                name=f"{name}.triton",
                calls=f"dual_norms.triton_{per}",
                functions=known.TRITON_GROUP_QUANT,
                kind="triton",
                keeps_norm=keeps_norm,
            )
        yield Binding(
            name=f"mla_dual_rms_norm_static{suffix}",
            calls="dual_norms.triton_static",
            functions=known.TRITON_STATIC_QUANT,
            kind="triton",
            keeps_norm=keeps_norm,
        )


LATENT_BINDINGS: tuple[Binding, ...] = tuple(_bindings())
