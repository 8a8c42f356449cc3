"""How a published checkpoint is quantised, linear by linear: the words of an entry, and what the specs of its layers say of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeAlias

import attrs
from attrs import frozen

from ..adapters.activation_quant import ActivationQuant
from ..adapters.errors import LayerfuseError, SpecError, shown
from ..adapters.linear_specs import NOT_QUANTISED
from ..adapters.specs import (
    ExpertsSpec,
    FinalNormSpec,
    GatedDeltaNetSpec,
    LayerSpec,
    Mamba2Spec,
    MLASpec,
    MLPSpec,
    ResidualSpec,
    WeightSpec,
)

Linears: TypeAlias = Literal["attention", "mlps", "shared_experts", "experts"]
LINEARS: tuple[Linears, ...] = ("attention", "mlps", "shared_experts", "experts")
"""The linears of a layer by what holds them: `mlps` are those of dense layers, `experts` the routed ones."""


@frozen(kw_only=True)
class QuantKind:
    """Linears of a published checkpoint that are quantised in one way. Those that no such table names are not."""

    linears: list[Linears]
    "Which: of attention, mlps (of dense layers), shared_experts and experts (routed ones)."
    weight: str
    "Dtype of one element, in torch's words: `float8_e4m3fn`; of packed ones what is packed: `int4`, `float4_e2m1fn`."
    scheme: Literal["tensor", "channel", "block", "group", "mx"]
    "What shares a scale, as `WeightSpec.scheme`."
    activation: str
    """What they do to what they read, as `plan --quant` takes it: "group128"; "none": they take it as it is."""
    source: str
    "Where that was read."
    block: list[int] | None = None
    "Output and input features that share a scale, of the schemes block, group and mx."
    method: str | None = None
    "`quant_method` of its `quantization_config`, by which engines choose what multiplies; None: it is not known."

    @property
    def quant(self) -> ActivationQuant | None:
        """How what they read is quantised; None: it is not."""
        return None if self.activation == "none" else ActivationQuant.parse(self.activation)

    @property
    def weight_spec(self) -> WeightSpec:
        """How these linears hold their weights.

        Raises:
            SpecError: no weight is held so.
        """
        block: Any = None if self.block is None else tuple(self.block)
        return WeightSpec(dtype=self.weight, scheme=self.scheme, block=block)

    def problems(self) -> Iterator[str]:
        """What in it cannot be true."""
        if not self.linears:
            yield "linears: expected at least one"
        try:
            _ = self.quant
        except LayerfuseError as error:
            yield f"activation: {error}"
        try:
            _ = self.weight_spec
        except SpecError as error:
            yield from error.problems

    def __str__(self) -> str:
        groups = "MX groups" if self.scheme == "mx" else f"{self.scheme}s"
        scales = (
            f"one scale per {self.scheme}" if self.block is None else f"{groups} of {' x '.join(map(str, self.block))}"
        )
        reads = "as they are" if self.activation == "none" else self.activation
        which = "all linears" if set(self.linears) == set(LINEARS) else ", ".join(self.linears).replace("_", " ")
        return f"{which} in {self.weight}, {scales}; activations {reads}"


def problems_of(kinds: Mapping[str, QuantKind]) -> Iterator[str]:
    """What in these tables cannot be true, together or alone."""
    taken: dict[str, str] = {}
    for name, kind in kinds.items():
        yield from (f"quant.{name}.{problem}" for problem in kind.problems())
        for linears in kind.linears:
            if linears in taken:
                yield f"quant.{name}.linears: {shown(linears)} already belongs to {taken[linears]}"
            taken[linears] = name


class Published:
    """The specs of declared layers, with what the linears that read their norms and products do."""

    def __init__(self, kinds: Mapping[str, QuantKind], *, scaled: bool = False, unsaid: str = NOT_QUANTISED) -> None:
        """Args: kinds: of the entry. scaled: a factor stands between the input norms and what reads them. unsaid: what is said of linears that no kind names."""
        self._unsaid = unsaid
        self._scaled = scaled
        self._said = {linears: kind for kind in kinds.values() for linears in kind.linears}

    def _reads(self, part: Any, linears: Linears | None) -> Any:
        kind = None if linears is None else self._said.get(linears)
        if kind is not None and kind.quant is not None:
            return attrs.evolve(part, quant=kind.quant)
        if kind is None:
            return attrs.evolve(part, unquantised=self._unsaid)
        how = f"their weights are {kind.weight}, and they take what they read as it is, in the published checkpoint"
        return attrs.evolve(part, unquantised=how)

    def routed(self, mixture: ExpertsSpec) -> ExpertsSpec:
        """A declared mixture with what its routed experts' weights are."""
        kind = self._said.get("experts")
        return mixture if kind is None else attrs.evolve(mixture, weight=kind.weight_spec, activation=kind.quant)

    def _mixture(self, mixture: ExpertsSpec) -> ExpertsSpec:
        shared = None if mixture.shared is None else self._reads(mixture.shared, "shared_experts")
        return attrs.evolve(self.routed(mixture), shared=shared)

    def of(self, spec: LayerSpec, *, shared: bool) -> LayerSpec:
        """The same layer as the checkpoint has it; `shared`: an MLP is the shared experts of a mixture."""
        if isinstance(spec, ResidualSpec):
            norms = spec.input_norms
            if not self._scaled:
                norms = tuple(self._reads(norm, "attention") for norm in norms)
            after = spec.post_attention_norms
            if not spec.undeclared:  # routed experts take the norm's result as it is
                mixture = spec.experts
                reader: Linears = "mlps" if mixture is None or mixture.beside_mlp else "shared_experts"
                if mixture is None or mixture.beside_mlp or mixture.shared is not None:
                    after = tuple(self._reads(norm, reader) for norm in after)
            experts = None if spec.experts is None else self._mixture(spec.experts)
            return attrs.evolve(spec, input_norms=norms, post_attention_norms=after, experts=experts)
        if isinstance(spec, MLASpec) and spec.q_norm is not None:
            return attrs.evolve(spec, q_norm=self._reads(spec.q_norm, "attention"))
        if isinstance(spec, GatedDeltaNetSpec | Mamba2Spec) and spec.output_norm is not None:
            return attrs.evolve(spec, output_norm=self._reads(spec.output_norm, "attention"))
        if isinstance(spec, FinalNormSpec):
            return attrs.evolve(spec, final_norm=self._reads(spec.final_norm, None))
        if isinstance(spec, MLPSpec):
            found: LayerSpec = self._reads(spec, "shared_experts" if shared else "mlps")
            return found
        return spec
