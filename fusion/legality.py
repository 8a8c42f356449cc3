"""Whether one fusion can stand at one site, from the site, the target and the quantisation alone.

Switches, engines and other fusions are not looked at: that is `plan`.
"""

from __future__ import annotations

from ..adapters.activation_quant import ActivationQuant
from ..adapters.errors import FOREIGN, said
from .chain import LAYERFUSE, Fusion
from .sites import Site
from .steps import SINKS, At, Legality
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
    norms = iter(site.norms)
    asked = [
        (step, At(site, target, quant, declared, next(norms) if step.is_norm else None, step is fusion.chain[0]))
        for step in fusion.chain
    ]
    for step, at in map(asked.__getitem__, fusion.from_the_middle):
        problem = step.why_not(at)
        if problem is not None:
            return problem
    before = [step.described(at) for step, at in asked if step.stage != SINKS]
    behind = [step.described(at) for step, at in asked if step.stage == SINKS]
    *others, last = before or behind
    what = f"{', '.join(others)} and {last} are" if others else f"{last} is"
    sinks = "".join(f", {each}" for each in behind if before)
    return Legality("expected", f"{what} {fusion.chain[-1].launches} on {target}{sinks}")
