"""The bindings of the norms that quantise to fp8: with and without a residual, with and without the plain norm."""

from __future__ import annotations

from collections.abc import Iterator

from . import functions as known
from .conventions import Binding


def _bindings() -> Iterator[Binding]:
    """In order of preference for each op: the kernel made for it, the kernel of the latents, Triton."""
    for adds in (False, True):
        single = (known.ADD_NORM_QUANT if adds else known.NORM_QUANT,)
        for keeps_norm in (False, True):
            ops = f"{'add_' if adds else ''}rms_norm_", f"_quant{'_with_norm' if keeps_norm else ''}"
            for per in ("per_token", "group"):
                name = per.join(ops)
                latents = known.LATENT_GROUP_QUANT if per == "group" else known.LATENT_TOKEN_QUANT
                if not keeps_norm:  # AITER's kernel made for a single norm gives no plain one
                    yield Binding(name=name, calls=f"norm_quant.hip_{per}", functions=single, adds=adds)
                yield Binding(
                    name=f"{name}.latents",
                    calls=f"norm_quant.latents_{per}",
                    functions=(latents,),
                    adds=adds,
                    keeps_norm=keeps_norm,
                )
                yield Binding(
                    name=f"{name}.triton",
                    calls=f"norm_quant.triton_{per}",
                    functions=known.TRITON_GROUP_QUANT,
                    kind="triton",
                    adds=adds,
                    keeps_norm=keeps_norm,
                )
            yield Binding(
                name="static".join(ops),
                calls="norm_quant.triton_static",
                functions=known.TRITON_STATIC_QUANT,
                kind="triton",
                adds=adds,
                keeps_norm=keeps_norm,
            )


QUANTISED_BINDINGS: tuple[Binding, ...] = tuple(_bindings())
