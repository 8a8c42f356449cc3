"""Whether one fusion can stand at one site, from the site, the target and the quantisation alone.

Switches, engines and other fusions are not looked at: that is `plan`.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..adapters.activation_quant import ActivationQuant
from ..adapters.errors import FOREIGN, said
from .chain import LAYERFUSE, Fusion
from .sites import Site
from .steps import SINKS, SOURCES, At, Legality, Step
from .target import Target


def legality(
    fusion: Fusion, site: Site, target: Target, quant: ActivationQuant | None, declared: bool = False
) -> Legality:
    """Whether a site has the steps of a fusion's chain, and the target takes them. Switches are not looked at; `declared`: as `At.declared`."""
    if site.absent is not None:
        return Legality("not_applicable", site.absent)
    if site.unknown is not None and site.multiplies is None:
        return Legality("refused", site.unknown)
    try:
        found = _asked_of_steps(fusion, site, target, quant, declared)
        kept = found.kind == "expected" and site.unknown is not None
        return Legality("refused", site.unknown or "") if kept else found
    except FOREIGN as error:
        if fusion.owner == LAYERFUSE:
            raise
        return Legality("refused", f"a step of {fusion.owner} raised {said(error)}")


def _asked_of_steps(
    fusion: Fusion, site: Site, target: Target, quant: ActivationQuant | None, declared: bool
) -> Legality:
    asked = list(_asked(fusion, site, target, quant, declared))
    # What stands nearest to the middle is asked first: without an add there is nothing to reduce for.
    sources = [each for each in asked if each[0].stage == SOURCES]
    for step, at in (*reversed(sources), *asked[len(sources) :]):
        problem = step.why_not(at)
        if problem is not None:
            return problem
    before = [step.described(at) for step, at in asked if step.stage != SINKS]
    behind = [step.described(at) for step, at in asked if step.stage == SINKS]
    *others, last = before or behind
    what = f"{', '.join(others)} and {last} are" if others else f"{last} is"
    sinks = "".join(f", {each}" for each in behind if before)
    return Legality("expected", f"{what} {fusion.chain[-1].launches} on {target}{sinks}")


def _asked(
    fusion: Fusion, site: Site, target: Target, quant: ActivationQuant | None, declared: bool
) -> Iterator[tuple[Step, At]]:
    """The steps of a chain, each with what it is asked about."""
    norms = iter(site.norms)
    for i, step in enumerate(fusion.chain):
        norm = next(norms) if step.is_norm else None
        yield step, At(site=site, target=target, quant=quant, declared=declared, norm=norm, first=i == 0)
