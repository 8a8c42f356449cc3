"""Why some of a site's norms are not among the norms of a graph, as a sentence."""

from __future__ import annotations

from collections.abc import Container, Iterable

from ...adapters.specs import NormSpec
from ..match.found import PartialMatch, epsilon_in_words
from ..match.values import is_number
from ..sites import LATENTS, QK, Site

_SIDES = {LATENTS: ("query", "key/value"), QK: ("query", "key")}


def why_missing(site: Site, has: Container[int], near: Iterable[PartialMatch]) -> str:
    """Why some of a site's norms are not among the norms of a graph. `has`: the places of those that are."""
    several = list(near)
    if len(site.norms) == 1:
        return _why("norm", site.norms[0], several)
    sides = list(zip(_SIDES[site.role], site.norms, strict=True))
    found = "".join(f"found the {name} norm only: " for i, (name, _) in enumerate(sides) if i in has)
    return found + "; ".join(
        _why(f"{name} norm", norm, several) for i, (name, norm) in enumerate(sides) if i not in has
    )


def _why(name: str, norm: NormSpec, near: list[PartialMatch]) -> str:
    wide = [n for n in near if n.width == norm.width]
    if not wide:
        widths = ", ".join(str(n.width) for n in near)
        seen = f"norms of width {widths} are" if widths else "no norm is"
        return f"no {name} of width {norm.width} in its part of the graph ({seen} there)"
    exact = [n for n in wide if is_number(n.epsilon, norm.epsilon)]
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
