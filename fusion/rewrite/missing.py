"""Why some of a site's norms are not among the norms of a graph, as a sentence."""

from __future__ import annotations

from ...adapters.specs import NormSpec
from ..match.found import PartialMatch, epsilon_in_words
from ..sites import Site
from .attribution import same_epsilon

_SIDES = ("query", "key/value")


def why_missing(site: Site, has_first: bool, has_second: bool, near: list[PartialMatch]) -> str:
    """Why some of a site's norms are not among the norms of a graph."""
    if len(site.norms) == 1:
        return _why("norm", site.norms[0], near)
    sides = [
        (f"{name} norm", norm)
        for name, norm, has in zip(_SIDES, site.norms, (has_first, has_second), strict=True)
        if not has
    ]
    found = "" if not (has_first or has_second) else f"found the {_SIDES[0 if has_first else 1]} norm only: "
    return found + "; ".join(_why(name, norm, near) for name, norm in sides)


def _why(name: str, norm: NormSpec, near: list[PartialMatch]) -> str:
    wide = [n for n in near if n.width == norm.width]
    if not wide:
        widths = ", ".join(str(n.width) for n in near)
        seen = f"norms of width {widths} are" if widths else "no norm is"
        return f"no {name} of width {norm.width} in its part of the graph ({seen} there)"
    exact = [n for n in wide if isinstance(n.epsilon, float) and same_epsilon(n.epsilon, norm.epsilon)]
    if not exact:
        return f"the {name} {wide[0].root} has {epsilon_in_words(wide[0].epsilon)}; the spec says {norm.epsilon!r}"
    offset = next((n.weight_offset for n in exact if n.weight_offset not in (None, norm.weight_offset)), None)
    if offset is not None:
        return f"the {name} {exact[0].root} adds {offset:g} to its weight; the spec says {norm.weight_offset:g}"
    shared = next((n.ungated or n.shared for n in exact if (n.ungated or n.shared) is not None), None)
    if shared is not None:
        return f"the {name} cannot be replaced: {shared}"
    return (
        f"the {name} {exact[0].root} is written in no known form, rounds to another dtype than its input's, or "
        "an intermediate of it has other readers"
    )
