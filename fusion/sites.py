"""Where chains of row-wise operations stand in a model: the sites of each layer, from its spec alone.

The site is the unit of planning, matching and reporting. A layer has several, and a graph may use each more than once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache, partial
from itertools import zip_longest
from typing import Any, NamedTuple, TypeAlias

import attrs
from attrs import field, frozen

from ..adapters.activation_quant import ActivationQuant
from ..adapters.errors import SpecError, counted, did_you_mean, shown
from ..adapters.linear_specs import NOT_QUANTISED, PLAIN
from ..adapters.specs import (
    AnySpec,
    ExpertsSpec,
    FinalNormSpec,
    GatedDeltaNetSpec,
    GatedMLPSpec,
    GQASpec,
    LayerSpec,
    LinearSpec,
    Mamba2Spec,
    MLAKernelSpec,
    MLASpec,
    MLPSpec,
    NormSpec,
    ResidualSpec,
)

INPUT = "input"
POST_ATTENTION = "post_attention"
FINAL = "final"
LATENTS = "latents"
QK = "qk"
OUTPUT = "output"
ACTIVATION = "activation"
LINEAR = "linear"
EXPERTS = "experts"
DECODE = "decode"


def sites_in_words(count: int) -> str:
    """`1 site`, `2 sites`."""
    return counted(count, "site")


@frozen
class Role:
    """What stands at one kind of site."""

    name: str
    norms: int
    "How many norms a chain at such a site has."
    doc: str = field(eq=False)
    "What that is, in words, which may change: two roles are the same by their name and their norms."


ROLES: dict[str, Role] = {
    role.name: role
    for role in (
        Role(INPUT, 1, "the norm at the entry of a decoder layer, after the residual add of the layer before"),
        Role(POST_ATTENTION, 1, "the norm between attention and MLP, after the residual add of the attention"),
        Role(FINAL, 1, "the norm after the last decoder layer"),
        Role(LATENTS, 2, "the norms of an MLA layer's query and key/value latents"),
        Role(QK, 2, "the norms of a grouped-query attention's query and key heads, and the rope behind them"),
        Role(OUTPUT, 1, "the gated norm of a delta net's value heads, or of a Mamba-2 layer"),
        Role(ACTIVATION, 0, "the product inside a gated MLP, before its down-projection"),
        Role(
            LINEAR,
            0,
            "a linear of attention, an MLP or shared experts, in an engine that has a place for another product there",
        ),
        Role(EXPERTS, 0, "the routed experts of a mixture, in such an engine"),
        Role(
            DECODE,
            0,
            "what stands around an MLA layer's attention in a decode step, in an engine that has a place for all of it",
        ),
    )
}
"""Every role a site can have: those of this library, and those that fusions of other packages stand at."""

OURS = frozenset(ROLES)
"""The roles of this library."""

STREAM = (INPUT, POST_ATTENTION, FINAL)
"""The roles of the residual stream."""

UNREAD = (QK, DECODE)
"""The roles of what no linear reads."""

PRODUCTS = (LINEAR, EXPERTS)
"""The roles of what multiplies with weights: engines alone have sites of these."""

OWN_PLACE = (*PRODUCTS, DECODE)
"""The roles of what only engines have a place for, each of its own kind."""


@frozen(kw_only=True, slots=False)  # hundreds are made for a plan, and so they are made faster
class Site:
    """One place in one layer."""

    layer: str
    "The layer's path in the model, or a label such as `layer 3` where no path was given."
    role: str
    "A name of `ROLES`."
    norms: tuple[NormSpec, ...]
    "In the order of the role: for `latents` the query's, then the key/value's; for `qk` the query's, then the key's."
    spec: AnySpec = field(repr=False)
    block: int = 0
    "Which attention block of the layer: LongCat-Flash has two, each with an input and a post-attention norm."
    adds: bool = False
    "Whether a residual is added in front of the norm. The first layer of a stream has nothing to add at its input norm."
    reduced: int = 1
    """Over how many ranks what joins the residual is summed: the tensor-parallel size of the attention or MLP before. 0: over
    several, but it is not added as it is."""
    producers: tuple[LinearSpec, ...] = field(default=(), eq=False, repr=False)
    "The linear whose result is added to the residual in front of the norm, as it is; empty where no spec says it."
    experts: ExpertsSpec | None = field(default=None, eq=False, repr=False)
    "The mixture that reads the norm, whose shared experts the product or the linear is of, or whose routed ones stand here."
    linear: LinearSpec | None = field(default=None, repr=False)
    "The linear that stands here; None: none alone."
    handed_over: bool = False
    "Whether a chain in front of the linear is expected to quantise for it."
    absent: str | None = None
    "Why no fusion can stand here, as a sentence; None where one can."
    unknown: str | None = None
    "Why the spec cannot say what stands here, or why an engine keeps it to itself, as a sentence; None where neither is so."

    @property
    def modules(self) -> tuple[str | None, ...]:
        """The paths below the layer of its norms, its linear or its mixture; None in the place of one that is not known, or of the layer itself."""
        multiplies = self.multiplies
        return tuple([norm.module for norm in self.norms]) or (None if multiplies is None else multiplies.path,)

    @property
    def multiplies(self) -> LinearSpec | ExpertsSpec | None:
        """What multiplies with weights here; None at the site of another role."""
        return self.linear or (self.experts if self.role == EXPERTS else None)

    @property
    def path(self) -> str:
        """Where its first module is in the model, or its layer."""
        module = self.modules[0]
        return f"{self.layer}.{module}" if self.layer and module else module or self.layer

    @property
    def quant(self) -> ActivationQuant | None:
        """How what reads the first norm, or the product, quantises it, or the linear or the experts what they read: as read off the model."""
        if self.multiplies is not None:
            return self.multiplies.activation if isinstance(self.multiplies.activation, ActivationQuant) else None
        if self.norms:
            return self.norms[0].quant
        return self.spec.quant if isinstance(self.spec, GatedMLPSpec) else None

    @property
    def no_sum(self) -> str | None:
        """What stands in front of its norm in the place of a sum, as a sentence; None where one does."""
        return self.spec.no_sum if isinstance(self.spec, ResidualSpec | FinalNormSpec) else None

    @property
    def undeclared(self) -> bool:
        """Whether a model's entry leaves open what reads it."""
        return isinstance(self.spec, ResidualSpec) and self.role == POST_ATTENTION and self.spec.undeclared

    @property
    def unquantised(self) -> str | None:
        """What the linears that read the first norm or the product do, as a sentence, where some quantise and `quant` cannot say how."""
        if self.norms:
            return self.norms[0].unquantised
        return self.spec.unquantised if isinstance(self.spec, GatedMLPSpec) else None

    @property
    def consumers(self) -> tuple[LinearSpec | ExpertsSpec, ...]:
        """What reads what its norms, or its product, give: a mixture's router and experts, then linears; empty where they were not read."""
        if self.multiplies is not None:
            return ()
        if isinstance(self.spec, GatedMLPSpec):
            return self.spec.consumers
        mixture = () if self.experts is None else self.experts.reads
        return (*mixture, *(linear for norm in self.norms for linear in norm.consumers))

    @property
    def beside_experts(self) -> bool:
        """Whether a linear that is none of the mixture's reads the norm too: LongCat-Flash has a dense MLP beside its experts."""
        within = f"{self.experts.path}." if self.experts is not None else ""
        declared = self.experts is not None and self.experts.beside_mlp
        return declared or any(not linear.path.startswith(within) for norm in self.norms for linear in norm.consumers)

    @property
    def routed_alone(self) -> bool:
        """Whether routed experts, and nothing else but their router, read the norm."""
        alone = self.experts is not None and self.experts.shared is None and bool(self.norms)
        return alone and not self.beside_experts and not any(norm.consumers for norm in self.norms)

    @property
    def quantising(self) -> str | None:
        """How many of those that read the first norm quantise it, in words, where some do and some do not."""
        readers = self.consumers if len(self.norms) == 1 else self.norms[0].consumers if self.norms else ()
        some = sum(reader.activation is not None for reader in readers)
        return f"{some} of {len(readers)} quantise it" if 0 < some < len(readers) else None

    @property
    def quantised_width(self) -> int:
        """Columns of what a quantisation takes here: a rank's heads of a gated norm are joined."""
        if isinstance(self.spec, GatedDeltaNetSpec | Mamba2Spec):
            heads, width = self.spec.gated_norm_shape
            return heads * width
        if isinstance(self.spec, GQASpec):
            return self.spec.num_local_heads * self.spec.head_dim
        if isinstance(self.spec, GatedMLPSpec):
            return self.spec.local_intermediate_size
        return self.norms[0].width if self.norms else 0

    @property
    def name(self) -> str:
        """Unique in a plan: `model.layers.3.self_attn:latents`."""
        role = self.role + (f".{self.block}" if self.block else "")
        layer = self.path if self.role in PRODUCTS else self.layer
        return f"{layer}:{role}" if layer else role

    def __str__(self) -> str:
        return self.name


@frozen(kw_only=True)
class OwnSites(LayerSpec):
    """A layer of another package's kind, which says its sites itself: at roles of this library, or of that package."""

    def sites(self, layer: str) -> tuple[Site, ...]:  # noqa: ARG002 (for those that have some)
        """Its sites, in the order in which a forward pass meets them; none unless it says some. `layer`: its path in the model."""
        return ()


class Stack(NamedTuple):
    """What the decoder layers of a model say of each other, by their index."""

    mixtures: Mapping[int | None, ExpertsSpec | None] = {}
    "The mixture of each."
    gives: Mapping[int | None, tuple[LinearSpec, ...]] = {}
    "The linear whose result it adds to the residual last, as it is."
    summed: Mapping[int | None, int] = {}
    """Over how many ranks that is summed, where the attention behind it does not say so; 0: over several, but it is not added as it
    is. Attention and MLP of one model may differ: transformers replicates DeepSeek-V3's attention."""


def stack_of(placed: Iterable[tuple[str, AnySpec]]) -> Stack:
    """What the layers among these (path, spec) pairs say of each other."""
    specs = [spec for _, spec in placed]
    streams = [spec for spec in specs if isinstance(spec, ResidualSpec)]
    # Shared experts may be whole on every rank where the routed ones beside them are not.
    summed: dict[int | None, int] = {
        spec.layer_index: spec.parallel.size
        for spec in specs
        if isinstance(spec, GatedMLPSpec) and spec.layer_index is not None and spec.parallel.size > 1
    }
    summed |= {spec.layer_index: spec.mlp_ranks for spec in streams if spec.mlp_ranks is not None}
    for spec in streams:
        if not spec.adds_one and summed.get(spec.layer_index, spec.parallel.size) > 1:
            summed[spec.layer_index] = 0
    return Stack(
        mixtures={spec.layer_index: spec.experts for spec in streams},
        gives={spec.layer_index: spec.gives for spec in streams if spec.adds_one},
        summed=summed,
    )


def sites_of(layer: str, spec: AnySpec, stack: Stack = Stack()) -> tuple[Site, ...]:  # noqa: B008 (it is empty)
    """The sites of one layer, in the order in which a forward pass meets them.

    Args:
        layer: the layer's path in the model; the empty string for the model itself.
        spec: what the layer is.
        stack: what the model's decoder layers say of each other; nothing if not given.

    Raises:
        SpecError: a spec of another package's kind says sites of no role, or without what the role has.
    """
    if isinstance(spec, ResidualSpec):
        return tuple(_stream(layer, spec, stack))
    if isinstance(spec, FinalNormSpec):
        return (_final(layer, spec, stack),)
    if isinstance(spec, GatedDeltaNetSpec):
        return (Site(layer=layer, role=OUTPUT, norms=(spec.output_norm,), spec=spec),)
    if isinstance(spec, Mamba2Spec):
        return (_scanned(layer, spec),)
    if isinstance(spec, GatedMLPSpec):
        mixture = stack.mixtures.get(spec.layer_index)
        experts = mixture if mixture is not None and spec == mixture.shared else None
        return (Site(layer=layer, role=ACTIVATION, norms=(), spec=spec, experts=experts),)
    if isinstance(spec, MLPSpec):
        absent = "the MLP has no gate, so that there is no product in front of its down-projection"
        return (Site(layer=layer, role=ACTIVATION, norms=(), spec=spec, absent=absent),)
    if isinstance(spec, MLAKernelSpec):
        reason = f"an inner kernel layer knows no norms; ask {spec.outer}"
        return (Site(layer=layer, role=LATENTS, norms=(), spec=spec, unknown=reason),)
    if isinstance(spec, MLASpec):
        return (latents_of(layer, spec),)
    if isinstance(spec, GQASpec) and spec.q_norm is not None and spec.k_norm is not None:
        shared = "it reads the keys of an earlier layer, and norms none of its own" if spec.shares_kv else None
        return (Site(layer=layer, role=QK, norms=(spec.q_norm, spec.k_norm), spec=spec, absent=shared),)
    return _said(layer, spec) if isinstance(spec, OwnSites) else ()


def _said(layer: str, spec: OwnSites) -> tuple[Site, ...]:
    """What a spec of another package says of itself, which no type held it to."""
    found: Any = spec.sites(layer)
    sites = tuple(found) if isinstance(found, Iterable) else (found,)
    problems = [problem for site in sites for problem in _bad_site(site)]
    if problems:
        raise SpecError(f"{type(spec).__name__}.sites({shown(layer)})", problems)
    return sites


def _bad_site(site: Any) -> Iterator[str]:
    if not isinstance(site, Site):
        yield f"expected its sites in a tuple, as (Site(...),), got {shown(site)}"
        return
    role = ROLES.get(site.role) if isinstance(site.role, str) else None
    if role is None:
        near = did_you_mean(site.role, ROLES) or "."
        yield f"no role is called {shown(site.role)}{near} Known: {', '.join(ROLES)}. One of your own is brought by a fusion."
        return
    if not isinstance(site.spec, LayerSpec):
        yield f"the site {role.name} says the spec of its layer, as spec=self, got {shown(site.spec)}"
    several: Any = site.norms
    norms = several if isinstance(several, tuple) and all(isinstance(norm, NormSpec) for norm in several) else None
    open_ended = site.absent is not None or site.unknown is not None
    if norms is None or (len(norms) != role.norms and not open_ended):
        yield f"a site of the role {role.name} has {role.norms} of NormSpec in a tuple, got {shown(several)}"
    name, kind, held = {
        LINEAR: ("linear", LinearSpec, site.linear),
        EXPERTS: ("experts", ExpertsSpec, site.experts),
    }.get(role.name, ("", object, None))
    if name and site.absent is None and not isinstance(held, kind):
        yield f"a site of the role {role.name} says what multiplies there, as {name}={kind.__name__}(...), got {shown(held)}"


def decode_sites(placed: Iterable[tuple[str, AnySpec]]) -> Iterator[Site]:
    """A site for the decode step of each MLA layer among (path, spec) pairs."""
    return (Site(layer=layer, role=DECODE, norms=(), spec=spec) for layer, spec in placed if isinstance(spec, MLASpec))


def _scanned(layer: str, spec: Mamba2Spec) -> Site:
    """The gated norm of a Mamba-2 layer: on this rank it is as wide as its heads, unless ranks share what it takes the variance of."""
    norm = spec.output_norm
    if norm is None:
        absent = "the layer has no norm before its output projection: the gate alone stands there"
        return Site(layer=layer, role=OUTPUT, norms=(), spec=spec, absent=absent)
    if spec.num_groups < spec.parallel.size:
        absent = f"its variance is over the heads of {spec.parallel.size // spec.num_groups} ranks, which no kernel of a rank sees"
        return Site(layer=layer, role=OUTPUT, norms=(norm,), spec=spec, absent=absent)
    return Site(layer=layer, role=OUTPUT, norms=(attrs.evolve(norm, width=spec.local_intermediate_size),), spec=spec)


def latents_of(layer: str, spec: MLASpec) -> Site:
    """The site of both latent norms of an MLA layer; its path is `layer`."""
    if spec.q_norm is None:
        reason = "q_lora_rank is None: there is no query latent norm to pair"
        return Site(layer=layer, role=LATENTS, norms=(spec.kv_norm,), spec=spec, absent=reason)
    return Site(layer=layer, role=LATENTS, norms=(spec.q_norm, spec.kv_norm), spec=spec)


def _final(layer: str, spec: FinalNormSpec, stack: Stack) -> Site:
    if spec.no_sum is not None:
        return Site(layer=layer, role=FINAL, norms=(spec.final_norm,), spec=spec)
    before = spec.layer_index - 1
    ranks, producers = stack.summed.get(before, spec.parallel.size), stack.gives.get(before, ())
    norms = (spec.final_norm,)
    return Site(layer=layer, role=FINAL, norms=norms, spec=spec, adds=True, reduced=ranks, producers=producers)


def _stream(layer: str, spec: ResidualSpec, stack: Stack) -> list[Site]:
    if not spec.input_norms:
        absent = "no norm reads the residual stream in this layer: its norms stand on what attention and MLP give"
        if spec.post_norms:
            absent = "this layer's norms stand behind its adds, and what they give is the stream itself, so that no sum is kept"
        absent = spec.no_sum or absent
        return [Site(layer=layer, role=role, norms=(), spec=spec, absent=absent) for role in (INPUT, POST_ATTENTION)]
    starts = spec.layer_index == 0 if spec.starts_stream is None else spec.starts_stream
    sites = []
    for block, (before, after) in enumerate(zip_longest(spec.input_norms, spec.post_attention_norms)):
        first, entered = starts and block == 0, spec.handed_over and block == 0
        at = partial(Site, layer=layer, spec=spec, block=block)
        ranks = spec.parallel.size if spec.adds_one or spec.parallel.size == 1 else 0
        adds = not first and spec.no_sum is None
        entering = before.producers if spec.adds_one else ()
        if adds and block == 0 and not entered:  # what is added is of the layer before
            entering = stack.gives.get(spec.layer_index - 1) or entering
        summed = stack.summed.get(spec.layer_index - (block == 0), ranks)
        mixture = None if block else spec.experts
        sites.append(
            at(
                role=INPUT,
                norms=(before,),
                adds=adds,
                reduced=summed if adds and not entered else 1,  # another rank of a pipeline has summed what it gave
                producers=entering,
                experts=mixture if spec.is_one_block else None,
            )
        )
        if spec.is_one_block:
            continue
        if after is None:
            absent = "the MLP reads the norm that the attention reads"
            sites.append(at(role=POST_ATTENTION, norms=(), absent=absent))
        elif spec.parallel_residual:  # of the same sum as the norm before
            sites.append(at(role=POST_ATTENTION, norms=(after,), experts=mixture))
        else:
            leaving = after.producers if spec.adds_one else ()
            sites.append(
                at(
                    role=POST_ATTENTION,
                    norms=(after,),
                    adds=spec.no_sum is None,
                    reduced=1 if spec.no_sum else ranks,
                    producers=leaving,
                    experts=mixture,
                )
            )
    return sites


# ---- linears


def mixture_sites(placed: Iterable[tuple[str, AnySpec]], left: Mapping[str, str]) -> Iterator[Site]:
    """A site for the routed experts of each decoder layer that has some; the arguments are those of `linear_sites`."""
    for layer, spec in placed:
        if isinstance(spec, ResidualSpec) and spec.experts is not None:
            site = Site(layer=layer, role=EXPERTS, norms=(), spec=spec, experts=spec.experts)
            yield attrs.evolve(site, unknown=left[site.path]) if site.path in left else site


def linear_sites(
    placed: Iterable[tuple[str, AnySpec]], left: Mapping[str, str], stack: Stack, loaded: bool
) -> Iterator[Site]:
    """A site for each linear of these layers, once: as they were read, or of layers that nobody has built, those that engines make of them.

    The second projection of MLA's key/value latent is none: with few tokens it is absorbed (DeepSeek-V2, arXiv 2405.04434, section 2.1.2).

    Args:
        placed: (path, spec) pairs.
        left: path of a linear or a mixture -> why an engine keeps it to itself, as a sentence.
        stack: what they say of each other.
        loaded: whether the model is built, so that it has only what was read.
    """
    placed = tuple(placed)
    read = [(layer, spec, _linears_of(spec)) for layer, spec in placed]
    if not loaded and not any(linears for _, _, linears in read):
        read = list(_declared(placed))
    met: set[str] = set()
    for layer, spec, linears in read:
        mixture = stack.mixtures.get(spec.layer_index)
        for linear in linears:
            path = f"{layer}.{linear.path}" if layer else linear.path
            if path not in met:
                met.add(path)
                yield Site(
                    layer=layer,
                    role=LINEAR,
                    norms=(),
                    spec=spec,
                    linear=linear,
                    experts=None if mixture is None else _of_shared(spec, linear, mixture),
                    unknown=left.get(path),
                )


def _linears_of(spec: AnySpec) -> tuple[LinearSpec, ...]:
    """Those that a spec was read with."""
    if isinstance(spec, ResidualSpec):
        norms = (*spec.input_norms, *spec.post_attention_norms)
        return (*(each for norm in norms for each in (*norm.consumers, *norm.producers)), *spec.gives)
    if isinstance(spec, MLASpec):
        return () if spec.q_norm is None else spec.q_norm.consumers
    if isinstance(spec, GatedDeltaNetSpec | Mamba2Spec):
        return () if spec.output_norm is None else spec.output_norm.consumers
    return spec.consumers if isinstance(spec, MLPSpec) else ()


def _merged(spec: AnySpec, gates: bool) -> Iterator[tuple[str, Side, Side]]:
    """The linears of a declared layer as engines merge and call them, each with what it reads and gives. Those of Mamba-2 are not known.

    `gates`: whether its attention may have an output gate, which no spec says and which makes the first linear wider.
    """
    if isinstance(spec, MLASpec):
        width, heads, local = spec.hidden_size, spec.num_heads, spec.num_local_heads
        queries = heads * spec.qk_head_dim, local * spec.qk_head_dim
        if spec.q_lora_rank is None:
            yield "q_proj", (width, width), queries
            yield "kv_a_proj_with_mqa", (width, width), (spec.latent_width, spec.latent_width)
        else:
            latents = spec.q_lora_rank + spec.latent_width
            yield "fused_qkv_a_proj", (width, width), (latents, latents)
            yield "q_b_proj", (spec.q_lora_rank, spec.q_lora_rank), queries
        yield "o_proj", (heads * spec.v_head_dim, local * spec.v_head_dim), (width, width)
    elif isinstance(spec, GQASpec):
        width = spec.hidden_size
        each = (0 if spec.values_are_keys else spec.v_head_dim) + spec.head_dim
        keys = (0, 0) if spec.shares_kv else (spec.num_kv_heads * each, spec.num_local_kv_heads * each)
        given = spec.num_heads * spec.head_dim + keys[0], spec.num_local_heads * spec.head_dim + keys[1]
        yield "qkv_proj", (width, width), (None, None) if gates else given
        yield "o_proj", (spec.num_heads * spec.v_head_dim, spec.num_local_heads * spec.v_head_dim), (width, width)
    elif isinstance(spec, GatedDeltaNetSpec):
        width, value = spec.hidden_size, (spec.num_v_heads * spec.head_v_dim, spec.num_local_v_heads * spec.head_v_dim)
        keys = spec.num_k_heads * spec.head_k_dim, spec.num_local_k_heads * spec.head_k_dim
        if spec.output_norm.activation == "silu":
            yield "in_proj_qkvz", (width, width), (2 * (keys[0] + value[0]), 2 * (keys[1] + value[1]))
            yield "out_proj", value, (width, width)
        else:  # Kimi's, whose gates have a rank that no spec says
            yield "in_proj_qkvgfab", (width, width), (None, None)
            yield "o_proj", value, (width, width)
    elif isinstance(spec, MLPSpec):
        width, inner, local = spec.hidden_size, spec.intermediate_size, spec.local_intermediate_size
        first, several = ("gate_up_proj", 2) if isinstance(spec, GatedMLPSpec) else ("up_proj", 1)
        yield first, (width, width), (several * inner, several * local)
        yield "down_proj", (inner, local), (width, width)


Side: TypeAlias = tuple[int | None, int | None]
"""Features on one side of a linear: the model's, and this rank's."""


def _declared(placed: Iterable[tuple[str, AnySpec]]) -> Iterator[tuple[str, AnySpec, tuple[LinearSpec, ...]]]:
    """The linears of layers that nobody has built: what they quantise, the checkpoint says of what reads the norms and the products."""
    placed = tuple(placed)
    norms = {spec.layer_index: spec.input_norm for _, spec in placed if isinstance(spec, ResidualSpec)}
    # The attention beside Qwen's delta nets has a gate.
    gates = any(isinstance(spec, GatedDeltaNetSpec) for _, spec in placed)
    for layer, spec in placed:
        # A second attention of a layer counts on.
        reads = spec if isinstance(spec, MLPSpec) else norms.get(spec.layer_index, next(iter(norms.values()), None))
        said = None if reads is None else reads.quant or reads.unquantised
        yield layer, spec, tuple([_unread(*linear, said) for linear in _merged(spec, gates)])


@cache
def _unread(path: str, reads: Side, gives: Side, activation: ActivationQuant | str | None) -> LinearSpec:
    whole = activation == NOT_QUANTISED
    column, row = gives[0] != gives[1], reads[0] != reads[1]
    return LinearSpec(
        path=path,
        in_features=reads[0],
        local_in_features=reads[1],
        out_features=gives[0],
        local_out_features=gives[1],
        local_outputs=(),
        style="column" if column else "row" if row else None,
        weight=PLAIN if whole else None,
        activation=None if whole else activation,
        takes_quantised=False,
        shares_input=(),
    )


def _of_shared(spec: AnySpec, linear: LinearSpec, mixture: ExpertsSpec) -> ExpertsSpec | None:
    """The mixture of a linear's layer, where the linear is of its shared experts."""
    if isinstance(spec, MLPSpec):
        return mixture if spec == mixture.shared else None
    inside = mixture.path is not None and linear.path.startswith(f"{mixture.path}.")
    return mixture if inside else None
