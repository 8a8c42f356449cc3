"""Which fusions are on in an engine by default, and whether one of them can find a site: from the measurements, without the catalog.

To import the catalog takes longer than a start-up with nothing to do may.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from ..fusion.engine import SPELT, Engine
from ..fusion.policy import Measurement, shipped
from .host import here
from .process import once


def on_by_default(engine: str, arch: str | None = None) -> dict[str, tuple[str, ...]]:
    """Fusion -> the architectures that it is on by default on in an engine, perhaps under further conditions.

    Args:
        engine: one of `fusion.engine.NAMES`.
        arch: as `Target.arch`; only what is on there. None: everywhere.
    """
    found: dict[str, dict[str, None]] = {}
    for each in _faster(engine):
        if arch in (None, each.arch):
            for name in each.fusions:
                found.setdefault(name, {})[each.arch] = None
    return {name: tuple(archs) for name, archs in sorted(found.items())}


def in_words(engine: str, release: str) -> str:
    """What is on by default in an engine, architecture by architecture, and with which releases that was measured, as a sentence; empty: nothing is."""
    releases, here = dict.fromkeys(each.release for each in _faster(engine)), Engine(name=engine, release=release)
    other = "" if any(map(here.is_release, releases)) else f", and this is {release}"
    archs = sorted({arch for several in on_by_default(engine).values() for arch in several})
    return "; ".join(
        f"on by default on {arch}, where `layerfuse plan` says so: {', '.join(sorted({*names, *beside(engine, names, arch)}))}, "
        f"as measured with {SPELT[engine]} {' and '.join(sorted(releases))}{other}"
        for arch in archs
        if (names := on_by_default(engine, arch))
    )


def with_block_linears(engine: str, linears: str) -> str:
    """With which releases fusions were measured faster where this is whose kernel multiplies by weights in fp8 blocks, in words."""
    rows = [each for each in _faster(engine) if each.linears == linears and each.fusions[0].endswith("_group_quant")]
    found = sorted({each.release for each in rows})
    return f"measured with {SPELT[engine]} {' and '.join(found)}" if found else "not measured"


def beside(engine: str, names: Collection[str], arch: str) -> tuple[str, ...]:
    """What is on by default on a GPU where these fusions are: products go with what quantises for them, and some with those."""
    from ..fusion.catalog import FUSIONS
    from ..fusion.catalog.few_token_linear import TIMED
    from .sglang import facts

    nowhere = facts.engine_of().refuses if engine == "sglang" else {}
    rest = {name: each for name, each in FUSIONS.items() if arch == TIMED and name not in nowhere}
    on = {*names, *(form.word for name in names if name in FUSIONS and (form := FUSIONS[name].format) is not None)}
    found: list[str] = []
    while more := [name for name, each in rest.items() if each.goes_with in on and name not in found]:
        found += more
        on.update(more)
    return tuple(found)


def may_find_a_site(
    engine: str, arch: str, *, ranks: int, quantised: bool = True, state: bool = True, latents: bool = True
) -> bool:
    """Whether anything that is on by default can find a site in a model, by what its config says.

    A fused quantisation wants a model that is quantised, an all-reduce its ranks, a gated norm stands behind a layer that has a state of
    its own, and MLA's chains in MLA layers. What a config does not say counts as there.

    Args:
        engine: as for `on_by_default`.
        arch: as `Target.arch`.
        ranks: the tensor-parallel size.
        quantised: whether the model is.
        state: whether it has layers with a state of their own.
        latents: whether it has MLA layers.
    """
    from ..registry.entry_points import entry_points

    # What other packages bring says for itself what it wants.
    return bool(entry_points("layerfuse.fusions", "layerfuse.formats")) or any(
        (quantised or not name.endswith("_quant"))
        and (state or not name.startswith("gated_"))
        and (latents or not name.startswith("mla_"))
        for each in _faster(engine)
        if each.arch == arch and each.ranks <= ranks
        for name in each.fusions
    )


def measured_elsewhere(engine: str, arch: str, device: str, release: str) -> str | None:
    """Where what is on by default was measured, as a sentence, if not on such a GPU with such a release; None where it was, or nothing is on.

    Args:
        engine: as for `on_by_default`.
        arch: as `Target.arch`.
        device: as the driver names it.
        release: of the engine.
    """
    there = {(each.release, each.device): None for each in _faster(engine) if each.arch == arch}
    here = Engine(name=engine, release=release)
    if not there or any(here.is_release(known) and gpu == device for known, gpu in there):
        return None
    spelt = SPELT[engine]
    where = " and ".join(f"{spelt} {known} on {gpu}" for known, gpu in there)
    return f"what is on by default here is what was measured faster with {where}; {spelt} {release} on {device} was not measured"


def say_if_measured_elsewhere(arch: str, device: str) -> None:
    """Say once where what is on by default in this engine was measured, if not on such a GPU with this release."""
    said = measured_elsewhere(here().package, arch, device, here().version())
    if said is not None:
        once(logging.INFO, "layerfuse: %s", said)


def _faster(engine: str) -> list[Measurement]:
    return [each for each in shipped().measurement if each.engine == engine and each.faster]
