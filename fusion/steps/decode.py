"""What stands around an MLA layer's attention in a decode step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve, field, frozen

from ...adapters.activation_quant import ActivationQuant
from ...adapters.specs import AnySpec, MLASpec
from ..declare import Kernel, Op, Result
from ..formats import FORMATS
from ..latent_ops import MLA
from ..sites import DECODE
from .step import SINKS, At, Legality, Whole

if TYPE_CHECKING:
    from ..rewrite.binding import Binding

WHY = {
    "no latent": "q_lora_rank is None: there is no query latent",
    "not roped": "none of its columns is roped, and the ops turn some in every launch",
    "rope unknown": "nothing says how its columns are roped",
}
"""What an MLA layer has -> why its decode step cannot be taken, as a sentence."""


WHY_UNQUANTISED = {
    "no blocks": "q_b_proj does not read its latent in fp8 with one scale per 128 columns, so that there is nothing to quantise it for",
    "by itself": "q_b_proj quantises in a launch of its own, whose place in vLLM's graphs is not taken",
}
"""What an MLA layer has -> why its query latent is not quantised in the launch of its norms, as a sentence."""


@frozen(kw_only=True)
class Decode(Whole):
    """Both latent norms, the ropes, the cache write and the absorbing product. Its op is the last of those in front of the attention."""

    stage = SINKS
    roles = frozenset({DECODE})
    first = "both norms"

    quantised: Op | None = field(default=None, repr=False)
    "The same where the attention takes its query in fp8."
    out: str = "query"

    @property
    def own_kernels(self) -> tuple[Kernel, ...]:
        return MLA[self.op]

    @property
    def in_parts(self) -> tuple[Decode, ...]:
        return () if self.quantised is None else (evolve(self, op=self.quantised, quantised=None),)

    def why_not(self, at: At) -> Legality | None:
        why = why_not_spec(at.site.spec)
        return None if why is None else Legality("not_applicable", why)

    def described(self, at: At) -> str:
        return f"the query's absorption and rope, behind a launch of {self.first}, the key's rope and the cache write,"

    def bind(self, bound: Binding) -> None:
        from ..match.errors import Unmatched

        raise Unmatched("an engine's own code puts it there")


@frozen(kw_only=True)
class QuantisedDecode(Decode):
    """The same with the query latent quantised in the launch of its norms, which is its op, for the linear that reads it."""

    length = 2
    in_graphs = False
    first = "both norms, the query latent's quantisation"
    reads_latents = True
    format = FORMATS["group"]

    @property
    def outs(self) -> tuple[str, ...]:
        return tuple(result.name for result in self.op.results)

    def results(self, of: str) -> tuple[Result, ...]:
        return self.op.results

    def why_not(self, at: At) -> Legality | None:
        spec = at.site.spec
        why = why_not_spec(spec) or why_not_quantised(spec, at.quant) or self.format.absent(at.target)
        return None if why is None else Legality("not_applicable", why)


def why_not_quantised(spec: AnySpec, quant: ActivationQuant | None) -> str | None:
    """Why what reads a layer's query latent does not take it quantised in groups, as a sentence; None where it does. `quant`: how it quantises it."""
    norm = spec.q_norm if isinstance(spec, MLASpec) else None
    several = norm is not None and len(norm.consumers) > 1
    if quant is None or quant.scheme != "group" or quant.group_size != 128 or several:
        return WHY_UNQUANTISED["no blocks"]
    return None if quant.inside else WHY_UNQUANTISED["by itself"]


def why_not_spec(spec: AnySpec) -> str | None:
    """Why the decode step of a layer cannot be taken, from its spec alone, as a sentence; None where it can."""
    if not isinstance(spec, MLASpec) or spec.q_norm is None:
        return WHY["no latent"]
    if spec.rope is None or spec.rope.width == 0:
        return WHY["rope unknown" if spec.rope is None else "not roped"]
    return None
