"""models.toml entries as typed values: what a model publishes about itself, and the specs that follow.

An entry alone, without torch and without a layer, gives the spec of every layer at any tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import NoneType
from typing import Any, ClassVar

from attrs import field, frozen

from ..adapters.arguments import check_whole, expect
from ..adapters.errors import SpecError, first_of
from ..adapters.specs import WHOLE, ExpertsSpec, FinalNormSpec, GatedMLPSpec, LayerSpec, NormSpec, ResidualSpec
from .errors import UnknownEngineError
from .kind_words import At, Every
from .kinds import (
    ENGINES,
    SHARED_EXPERTS,
    Around,
    EngineFacts,
    ExpertsKind,
    GQAKind,
    LayerKind,
    MLPKind,
    experts_around,
)
from .mixer_kinds import Mamba2Kind, MLPBlockKind
from .published import Published, QuantKind

_ATTENTIONS = ("mla", "gated_delta_net", "gqa")
FINAL = "final"
"""The name of the norm after a declared model's last layer."""

MOST_LAYERS = 1_000
"""More decoder layers than this is a typing error, refused before anything is built from it."""


@frozen(kw_only=True)
class ModelEntry:
    """One model: its published dimensions, and the layer classes it brings of its own."""

    UNSTRUCTURED: ClassVar[tuple[str, ...]] = ("name",)
    "Fields that the file does not say inside the entry."

    name: str
    "As users type it; the table's name in models.toml."
    adapter: str
    "The adapter that reads its layers."
    source: str
    "Where the dimensions were read."
    num_hidden_layers: int
    "Decoder layers."
    hidden_size: int
    "Width of the residual stream."
    rms_norm_eps: float
    "Epsilon of the decoder layers' norms and the final norm, and of the others unless they say otherwise."
    layers: dict[str, LayerKind]
    """The kinds of layer by name, by their attention or what stands in its place; together they cover every decoder layer exactly once.
    What is `beside_attention` is counted apart."""
    mlps: dict[str, MLPKind] = field(factory=dict)
    "The kinds of gated MLP by name, `shared_experts` for those of mixtures. One per attention block, or none."
    experts: ExpertsKind | None = None
    "The routed experts of its mixtures, if it has some; left out: nothing is said of them."
    norm_weight_offset: float = 0.0
    "1.0 where the decoder layers' norms and the final norm are zero-centred (Gemma, Qwen3-Next)."
    added_as_given: bool = True
    """False where a norm (Gemma 3) or a factor (MiniCPM3) stands between what attention and MLP give and the residual add.
    It is false of kinds with `stream_norms = "none"`, whatever is said here."""
    attentions_per_layer: int = 1
    "Attention blocks in one decoder layer: 2 in LongCat-Flash."
    aliases: list[str] = field(factory=list)
    "Short names that find the model too: lower-case, without blanks, and of no other model."
    hf_id: str | None = None
    "The checkpoint's name on the Hugging Face hub."
    model_type: str | None = None
    "`model_type` of its config.json."
    architectures: list[str] = field(factory=list)
    "`architectures` of its config.json."
    quant: dict[str, QuantKind] = field(factory=dict)
    "How the checkpoint that `hf_id` names is quantised, by names of their own; nothing: it is not, or nothing says it."
    engines: dict[str, EngineFacts] = field(factory=dict)
    "Engines that build the model otherwise than published: norms with another epsilon, KV heads without replicas."
    layer_classes: dict[str, Any] = field(factory=dict)
    "Layer classes this model brings: class -> table (or list of tables) of facts, in the words of adapters."

    @property
    def names(self) -> tuple[str, ...]:
        """Everything that finds this model, in lower case: its name, its aliases and its Hugging Face id."""
        return (self.name, *self.aliases, *([] if self.hf_id is None else [self.hf_id.lower()]))

    def kind_at(self) -> list[str]:
        """The kind of each decoder layer, in order.

        Raises:
            SpecError: the kinds leave a layer out, or claim one twice.
        """
        alone = {name: kind for name, kind in self.layers.items() if name not in self.beside}
        claimed, problems = _claims(self.num_hidden_layers, "layers", alone)
        left = [index for index, name in enumerate(claimed) if name is None]
        if left and not problems:
            problems.append(f"layers: no kind claims layer {first_of(left)}")
        if problems:
            raise SpecError(self.name, _listed(problems))
        return [name for name in claimed if name is not None]

    @property
    def beside(self) -> dict[str, Mamba2Kind]:
        """The kinds that stand beside an attention."""
        return {
            name: kind for name, kind in self.layers.items() if isinstance(kind, Mamba2Kind) and kind.beside_attention
        }

    def beside_at(self) -> list[str | None]:
        """The kind beside the attention of each decoder layer, in order; None where there is none.

        Raises:
            SpecError: the kinds claim a layer twice, one that does not exist, or one that has no attention.
        """
        if not self.beside:
            return [None] * self.num_hidden_layers
        claimed, problems = _claims(self.num_hidden_layers, "layers", self.beside)
        kinds = self.kind_at()
        problems += [
            f"layers.{name}.beside_attention: layer {index} is of the kind {kinds[index]}, which is no attention"
            for index, name in enumerate(claimed)
            if name is not None and self.layers[kinds[index]].family not in _ATTENTIONS
        ]
        if problems:
            raise SpecError(self.name, _listed(problems))
        return claimed

    def mlp_at(self) -> list[str | None]:
        """The kind of gated MLP of each decoder layer, in order; None where it has none, or none is declared.

        Raises:
            SpecError: the kinds claim a layer twice, or one that does not exist.
        """
        claimed, problems = _claims(self.num_hidden_layers, "mlps", self.mlps)
        if self.attentions_per_layer > 1 and SHARED_EXPERTS in claimed:
            problems.append(
                f"mlps.{SHARED_EXPERTS}: of {self.attentions_per_layer} MLPs in a layer, which stands beside its experts is not known"
            )
        if self.num_hidden_layers == len(claimed) and any(claimed):
            kinds = self.kind_at()
            problems += [
                f"mlps.{name}.at: layer {index} is of the kind {kinds[index]}, which is one block without an MLP"
                for index, name in enumerate(claimed)
                if name is not None and self.layers[kinds[index]].stream_norms == "one"
            ]
        if problems:
            raise SpecError(self.name, _listed(problems))
        return claimed

    def mixture_at(self) -> list[bool]:
        """Which decoder layers have routed experts, as far as that is declared.

        Raises:
            SpecError: they claim a layer that does not exist, or no layer, or one that `mlps` gives shared experts to is not among them.
        """
        mlps = self.mlp_at()
        blocks = [self.layers[kind] for kind in self.kind_at()]
        with_shared = [isinstance(block, MLPBlockKind) and block.shared_experts for block in blocks]
        if self.experts is None:
            return [mlp == SHARED_EXPERTS or block for mlp, block in zip(mlps, with_shared, strict=True)]
        if self.experts.at == "rest":
            found = [
                mlp == SHARED_EXPERTS or with_shared[i] or (mlp is None and blocks[i].stream_norms != "one")
                for i, mlp in enumerate(mlps)
            ]
            problems = [] if any(found) else ['experts.at: no layer is left for "rest"']
        else:
            claimed, problems = _claims(self.num_hidden_layers, "", {"experts": self.experts})
            found = [name is not None for name in claimed]
            alone = [
                i for i, (mlp, mixed) in enumerate(zip(mlps, found, strict=True)) if mlp == SHARED_EXPERTS and not mixed
            ]
            problems += [f"experts.at: layer {index}, which has shared experts, is not among them" for index in alone]
        if problems:
            raise SpecError(self.name, _listed(problems))
        return found

    def specs(
        self, tp: int = 1, rank: int | None = None, *, engine: str | None = None, published: bool = False
    ) -> list[tuple[str, LayerSpec]]:
        """The spec of every layer on one rank, as (name, spec) in layer order, and that of the final norm after them.

        Args:
            tp: tensor-parallel size.
            rank: which of those ranks; 0 unless given.
            engine: whose epsilons to use where engines disagree ("transformers", "vllm", ...). None, and an
                engine that the entry notes no exception for: the published.
            published: also say how the linears of the published checkpoint quantise what they read, where `quant` says it.

        Raises:
            SpecError: the entry contradicts itself, or a layer cannot be sharded that way, by this engine or by any.
            UnknownEngineError: neither a known engine, nor one that the entry has a table for.
            ArgumentError: an argument is of another type.
        """
        refused = self.refusal(tp, engine)
        if refused is not None:
            raise SpecError(f"{self.name} at tensor-parallel size {tp}", [refused])
        whole = list(self._whole(engine, self.kind_at(), self.mlp_at()))
        if published and self.quant:
            as_published = Published(self.quant, scaled=bool(self.beside))
            whole = [(path, as_published.of(spec, shared=SHARED_EXPERTS in path.split("."))) for path, spec in whole]
        if tp == 1 and rank in (None, 0):
            return whole
        sharded: dict[LayerSpec, LayerSpec] = {}
        return [(path, sharded.setdefault(spec, spec.shard(tp, rank))) for path, spec in whole]

    @property
    def known_engines(self) -> tuple[str, ...]:
        """The engines of the library, and those that this entry has a table for."""
        return tuple(dict.fromkeys((*ENGINES, *self.engines)))

    def check_engine(self, engine: str | None) -> None:
        """Refuse an engine that neither the library nor this entry knows.

        Raises:
            UnknownEngineError: with the closest names.
            ArgumentError: this is no name.
        """
        expect("engine", engine, (str, NoneType), f"one of {', '.join(self.known_engines)}")
        if engine is not None and engine not in self.known_engines:
            raise UnknownEngineError(engine, self.known_engines)

    def refusal(self, tp: int, engine: str | None) -> str | None:
        """Why this engine cannot build the model on so many ranks, in a sentence, or None where that is not known."""
        self.check_engine(engine)
        check_whole(tp=tp)
        if engine is None or engine not in self.engines or self.engines[engine].replicates_kv_heads:
            return None
        least = min((kind.num_kv_heads for kind in self.layers.values() if isinstance(kind, GQAKind)), default=tp)
        if tp <= least:
            return None
        return (
            f"{engine} shares out the {least} KV heads of this model without replicating them, so that each of {tp} ranks "
            f"would hold {least} // {tp} = 0 of them, and it cannot be built"
        )

    def first_of_each_kind(self, *, engine: str | None = None) -> list[tuple[str, LayerSpec]]:
        """As `specs`, of only the first decoder layer of each kind: enough to know whether the entry is sound.

        Raises:
            SpecError: the entry contradicts itself.
            UnknownEngineError: as for `specs`.
        """
        self.check_engine(engine)
        kinds, mlps = self.kind_at(), self.mlp_at()
        said: list[list[Any]] = [kinds, mlps, self.mixture_at(), self.beside_at()]
        firsts = {place for each in said for place in map(each.index, each)}
        return list(self._whole(engine, kinds, mlps, firsts))

    def _whole(
        self, engine: str | None, kinds: list[str], mlps: list[str | None], only: set[int] | None = None
    ) -> Iterator[tuple[str, LayerSpec]]:
        norms = EngineFacts() if engine is None else self.engines.get(engine, EngineFacts())
        eps = self.rms_norm_eps if norms.rms_norm_eps is None else norms.rms_norm_eps
        norm = NormSpec(width=self.hidden_size, epsilon=eps, weight_offset=self.norm_weight_offset)
        each, mixtures = self.attentions_per_layer, self.mixture_at()
        decoder_norms = (norm,) * each
        beside = self.beside_at()
        for index, (kind, mlp) in enumerate(zip(kinds, mlps, strict=True)):
            if only is not None and index not in only:
                continue
            blocks = [(f".{block}" if each > 1 else "", self._common(index * each + block)) for block in range(each)]
            declared = self.layers[kind]
            read = () if declared.stream_norms == "none" else decoder_norms
            one = declared.stream_norms == "one"
            made = {} if mlp is None else {suffix: self.mlps[mlp].spec(common) for suffix, common in blocks}
            yield (
                f"layers.{index}",
                ResidualSpec(
                    **self._common(index),
                    input_norms=read,
                    post_attention_norms=() if one else read,
                    added_as_given=self.added_as_given and read != (),
                    experts=self._mixture(mlp, made) if mixtures[index] else None,
                    undeclared=mlp is None and not mixtures[index] and not one,
                ),
            )
            for suffix, common in blocks:
                around = Around(
                    common=common,
                    rms_norm_eps=self.rms_norm_eps,
                    norm_weight_offset=self.norm_weight_offset,
                    engine=norms,
                )
                yield f"layers.{index}.{kind}{suffix}", declared.spec(around)
                if (other := beside[index]) is not None:
                    yield f"layers.{index}.{other}{suffix}", self.layers[other].spec(around)
            yield from ((f"layers.{index}.{mlp}{suffix}", spec) for suffix, spec in made.items())
        if only is None:
            yield FINAL, FinalNormSpec(**self._common(self.num_hidden_layers), final_norm=norm)

    def _mixture(self, mlp: str | None, made: Mapping[str, GatedMLPSpec]) -> ExpertsSpec:
        """The experts of one layer, beside what its MLP is made into."""
        shared = made[""] if mlp == SHARED_EXPERTS else None
        if self.experts is not None:
            return self.experts.spec(shared, beside_mlp=mlp not in (None, SHARED_EXPERTS))
        return experts_around(shared)

    def _common(self, layer_index: int) -> dict[str, Any]:
        return {"hidden_size": self.hidden_size, "layer_index": layer_index, "parallel": WHOLE}


def _listed(problems: list[str], most: int = 20) -> list[str]:
    """The first of these, and how many more there are."""
    return problems if len(problems) <= most else [*problems[:most], f"and {len(problems) - most} more"]


def _claims(
    total: int, table: str, kinds: Mapping[str, LayerKind | MLPKind | ExpertsKind]
) -> tuple[list[str | None], list[str]]:
    """Which kind claims each decoder layer, and what is wrong with the claims."""
    if not 1 <= total <= MOST_LAYERS:
        return [], [f"num_hidden_layers: expected 1 to {MOST_LAYERS}, got {total}"]
    claimed: list[str | None] = [None] * total
    problems = []
    table = f"{table}." if table else ""
    rest = [name for name, kind in kinds.items() if kind.at == "rest"]
    if len(rest) > 1:
        problems.append(f'{table[:-1]}: only one kind can be at "rest", got {", ".join(rest)}')
    for name, kind in kinds.items():
        for index in _places(kind.at, total):
            if not 0 <= index < total:
                problems.append(f"{table}{name}.at: layer {index} does not exist among {total} (counted from 0)")
            elif claimed[index] is not None:
                problems.append(f"{table}{name}.at: layer {index} already belongs to {claimed[index]}")
            else:
                claimed[index] = name
    nowhere = [name for name, kind in kinds.items() if kind.at != "rest" and name not in claimed]
    # A kind that another one pushed out is reported already.
    problems += [f"{table}{name}.at: claims no layer" for name in nowhere if not problems]
    if rest and None not in claimed:
        problems.append(f'{table}{rest[0]}.at: no layer is left for "rest"')
    return [name if name is not None else rest[0] if rest else None for name in claimed], problems


def _places(at: At, total: int) -> range | list[int]:
    if at == "rest":
        return []
    if isinstance(at, Every):
        return range(at.start, total, at.step)
    return at if isinstance(at, list) else range(total)
