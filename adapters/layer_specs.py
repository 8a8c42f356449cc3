"""The specs of whole layers: attention of three families, gated MLPs, the residual stream of a decoder layer, the final norm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Self

import attrs
from attrs import frozen

from .activation_quant import ActivationQuant
from .errors import SpecError
from .linear_specs import LinearSpec, WeightSpec
from .norm_specs import GatedNormSpec, HeadPair, NormSpec, Parallel
from .rope_specs import RopeSpec
from .spec_fields import NESTED, Checked, as_float, count, kinds_in, made, of_kind, optional_count, width_or_zero


@frozen(kw_only=True)
class LayerSpec(Checked):
    """What every outer layer knows of itself."""

    pairs: ClassVar[tuple[HeadPair, ...]] = ()
    "The head counts of this kind of layer, total and local."

    hidden_size: int = count()
    "Width of the residual stream the layer reads and writes."
    layer_index: int = of_kind("index")
    "0-based, as the layer itself counts: LongCat's two attentions per decoder layer count on, 0 to 55."
    parallel: Parallel = of_kind("parallel")
    "Degree and rank this layer was sharded by."

    def shard(self, size: int, rank: int | None = None) -> Self:
        """The same layer on one of `size` ranks (rank 0 unless given), without the linears that were read off it as it is shared now.

        Raises:
            SpecError: the heads cannot be shared by that many ranks, or there is no such rank.
        """
        parallel = made(Parallel, {"size": size, "rank": 0 if rank is None else rank})
        local: dict[str, int] = {}
        problems: list[str] = []
        for pair in self.pairs:
            try:
                local[pair.local] = pair.local_of(getattr(self, pair.total), size)
            except SpecError as error:
                problems.extend(error.problems)
        if problems:
            raise SpecError(f"{type(self).__name__} at tensor-parallel size {size}", problems)
        others = {} if size == self.parallel.size else self._of_other_ranks(parallel)
        return attrs.evolve(self, parallel=parallel, **local, **others)

    def _of_other_ranks(self, parallel: Parallel) -> dict[str, Any]:  # noqa: ARG002
        """What else differs where the layer is shared by more or fewer ranks."""
        return dict(_without_linears(self))

    def _contradictions(self) -> Iterator[str]:
        size = self.parallel.size
        for pair in self.pairs:
            total, local = getattr(self, pair.total), getattr(self, pair.local)
            try:
                expected = pair.local_of(total, size)
            except SpecError as error:
                yield f"{pair.total}: {error.problems[0]}"
            else:
                if local != expected:
                    yield f"{pair.local}: expected {expected} ({pair.total} {total} over {size} ranks), got {local}"


def _without_linears(spec: Checked) -> Iterator[tuple[str, Any]]:
    """The fields of a spec that hold linears, or norms that do, without them."""
    for name, kind in kinds_in(type(spec)):
        held = getattr(spec, name)
        if kind == "linears":
            yield name, ()
        elif kind == "norms":
            yield name, tuple(map(_unread, held))
        elif isinstance(held, NormSpec):
            yield name, _unread(held)


def _unread(norm: NormSpec) -> NormSpec:
    return norm if norm.consumers == norm.producers == () else attrs.evolve(norm, **dict(_without_linears(norm)))


# ---- the layers ------------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class MLASpec(LayerSpec):
    """Multi-head latent attention (DeepSeek-V2 report, arXiv 2405.04434, section 2.1)."""

    pairs: ClassVar[tuple[HeadPair, ...]] = (HeadPair(total="num_heads", local="num_local_heads", replicates=False),)

    num_heads: int = count()
    "Query heads of the whole model. MLA has one latent KV head, held by every rank, so no KV count exists."
    num_local_heads: int = count()
    "Query heads of this rank, before any padding a kernel may ask for."
    q_lora_rank: int | None = optional_count()
    "Width of the query latent, or None: queries are projected directly and there is no query norm."
    kv_lora_rank: int = count()
    "Width of the key/value latent, the part of the cache entry that is normed."
    qk_nope_head_dim: int = count()
    "Per-head query/key width without rotary embedding."
    qk_rope_head_dim: int = width_or_zero()
    "Width of the key part shared by all heads; it exists even where no rotation is applied to it (Kimi-Linear)."
    v_head_dim: int = count()
    "Per-head value width."
    q_norm: NormSpec | None = of_kind("optional_norm", goes_with="q_lora_rank")
    "Norm of the query latent; None exactly when q_lora_rank is None."
    kv_norm: NormSpec = of_kind("norm")
    "Norm of the key/value latent."
    softmax_scale: float = of_kind("positive", converter=as_float)
    "Factor on the attention logits, long-context correction (yarn mscale squared) included."
    rope: RopeSpec | None = of_kind("optional_rope", default=None)
    "How the rope columns are turned; of width 0 where they are not. None: nothing says it, and `mla_decode` leaves the layer alone."

    @property
    def qk_head_dim(self) -> int:
        """Per-head query/key width of the expanded form: nope + rope."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_width(self) -> int:
        """Width of one token's cache entry: kv_lora_rank + qk_rope_head_dim."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def split_sizes(self) -> tuple[int, ...]:
        """How the down-projection's output splits along its last dimension: query latent if any, KV latent, rope key."""
        query = () if self.q_lora_rank is None else (self.q_lora_rank,)
        return (*query, self.kv_lora_rank, self.qk_rope_head_dim)

    def _contradictions(self) -> Iterator[str]:
        yield from LayerSpec._contradictions(self)
        if self.qk_rope_head_dim % 2:
            yield f"qk_rope_head_dim: rotary embedding turns pairs, so it must be even, got {self.qk_rope_head_dim}"
        if (self.q_lora_rank is None) != (self.q_norm is None):
            yield f"q_norm: a query latent and its norm come together, got q_lora_rank {self.q_lora_rank} and {self.q_norm}"
        elif self.q_norm is not None and self.q_norm.width != self.q_lora_rank:
            yield f"q_norm: width {self.q_norm.width} is not the q_lora_rank {self.q_lora_rank}"
        if self.kv_norm.width != self.kv_lora_rank:
            yield f"kv_norm: width {self.kv_norm.width} is not the kv_lora_rank {self.kv_lora_rank}"
        if self.rope is not None and self.rope.width not in (0, self.qk_rope_head_dim):
            yield f"rope: width {self.rope.width} is neither the qk_rope_head_dim {self.qk_rope_head_dim} nor 0"


@frozen(kw_only=True)
class GatedDeltaNetSpec(LayerSpec):
    """A gated delta net: Qwen's (arXiv 2412.06464) or Kimi's delta attention (KDA, arXiv 2510.26692)."""

    pairs: ClassVar[tuple[HeadPair, ...]] = (
        HeadPair(total="num_k_heads", local="num_local_k_heads", replicates=False),
        HeadPair(total="num_v_heads", local="num_local_v_heads", replicates=False),
    )

    num_k_heads: int = count()
    "Key (and query) heads of the whole model."
    num_v_heads: int = count()
    "Value heads of the whole model: a multiple of the key heads, equal to them in KDA."
    num_local_k_heads: int = count()
    "Key heads of this rank."
    num_local_v_heads: int = count()
    "Value heads of this rank."
    head_k_dim: int = count()
    "Width of one key head."
    head_v_dim: int = count()
    "Width of one value head."
    conv_kernel_size: int = count()
    "Taps of the short causal convolution; its state holds one token fewer."
    output_norm: GatedNormSpec = of_kind("gated_norm")
    "The gated norm of each value head before the output projection."

    @property
    def gated_norm_shape(self) -> tuple[int, int]:
        """Last two dimensions of the gated norm's input on this rank: (local value heads, head_v_dim)."""
        return (self.num_local_v_heads, self.head_v_dim)

    @property
    def conv_dim(self) -> int:
        """Channels of this rank's convolution: queries and keys, then values."""
        return 2 * self.num_local_k_heads * self.head_k_dim + self.num_local_v_heads * self.head_v_dim

    def _contradictions(self) -> Iterator[str]:
        yield from LayerSpec._contradictions(self)
        if self.num_v_heads % self.num_k_heads:
            yield f"num_v_heads: {self.num_v_heads} is no multiple of num_k_heads {self.num_k_heads}"
        if self.output_norm.width != self.head_v_dim:
            yield f"output_norm: width {self.output_norm.width} is not the head_v_dim {self.head_v_dim}"


@frozen(kw_only=True)
class GQASpec(LayerSpec):
    """Grouped-query attention (arXiv 2305.13245); multi-head and multi-query attention are its two ends."""

    pairs: ClassVar[tuple[HeadPair, ...]] = (
        HeadPair(total="num_heads", local="num_local_heads", replicates=False),
        HeadPair(total="num_kv_heads", local="num_local_kv_heads", replicates=True),
    )

    num_heads: int = count()
    "Query heads of the whole model."
    num_local_heads: int = count()
    "Query heads of this rank."
    num_kv_heads: int = count()
    "Key/value heads of the whole model, replicas not counted."
    num_local_kv_heads: int = count()
    "Key/value heads this rank holds, at least 1."
    head_dim: int = count()
    "Width of one query or key head."
    v_head_dim: int = count()
    "Width of one value head."
    softmax_scale: float = of_kind("positive", converter=as_float)
    "Factor on the attention logits."
    sliding_window: int | None = of_kind("window")
    "Tokens a query sees, itself included, or None where it sees all."
    has_sinks: bool = of_kind("flag")
    "Whether each query head has a learned sink logit in the softmax."
    shares_kv: bool = of_kind("flag", default=False)
    """Whether it reads the keys and values that an earlier layer of its kind made (Gemma 4), so that it projects none and has no cache.
    The heads are then those of what it reads."""
    values_are_keys: bool = of_kind("flag", default=False)
    "Whether its values are what the key projection gives, so that there is no other projection (Gemma 4); they are cached all the same."
    q_norm: NormSpec | None = of_kind("optional_norm", default=None)
    "Norm of each query head, as wide as a head. None: there is none, or nothing says it; norms over all heads at once have no field."
    k_norm: NormSpec | None = of_kind("optional_norm", default=None)
    "Norm of each key head, likewise; the two come together."
    rope: RopeSpec | None = of_kind("optional_rope", default=None)
    "How query and key are turned: the first columns of each head. None: nothing says it, and `qk_norm_rope` leaves the layer alone."

    @property
    def num_kv_head_replicas(self) -> int:
        """Ranks that hold a copy of the same KV head."""
        return max(1, self.parallel.size // self.num_kv_heads)

    def _contradictions(self) -> Iterator[str]:
        yield from LayerSpec._contradictions(self)
        if self.num_heads % self.num_kv_heads:
            yield f"num_heads: {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}"
        if (self.q_norm is None) != (self.k_norm is None):
            yield f"k_norm: the norms of query and key come together, got {self.q_norm} and {self.k_norm}"
        for name, norm in (("q_norm", self.q_norm), ("k_norm", self.k_norm)):
            if norm is not None and norm.width != self.head_dim:
                yield f"{name}: width {norm.width} is not the head_dim {self.head_dim}"
        if self.rope is not None and self.rope.width > self.head_dim:
            yield f"rope: width {self.rope.width} is more than the head_dim {self.head_dim}"
        if self.rope is not None and self.rope.width % 2:
            yield f"rope: width {self.rope.width} is odd, and columns are turned in pairs"
        if self.values_are_keys and self.v_head_dim != self.head_dim:
            yield f"v_head_dim: {self.v_head_dim} is not the head_dim {self.head_dim}, and values_are_keys says that values are keys"


@frozen(kw_only=True, cache_hash=True)
class MLPSpec(LayerSpec):
    """A plain MLP, `down(act(up(x)))`: that of GPT-2 and of most models before gates."""

    pairs: ClassVar[tuple[HeadPair, ...]] = (
        HeadPair(total="intermediate_size", local="local_intermediate_size", replicates=False, what="columns"),
    )

    layer_index: int | None = of_kind("optional_index")  # type: ignore[assignment]  # an int in all other layers
    """0-based, from the module's name in its model, as no MLP keeps its index: those of LongCat-Flash count on, 0 to 55.
    None where it was read without such a name."""
    intermediate_size: int = count()
    "Width between the projections in the whole model: of the gate alone, not of gate and up as engines merge them."
    local_intermediate_size: int = count()
    "The same on this rank: the columns of the activation's result, which the down-projection takes."
    activation: str = of_kind("mlp_activation")
    "What stands between the projections; of a gated one, what the gate passes through."
    quant: ActivationQuant | None = of_kind("activation_quant", default=None, eq=False, repr=False)
    """How the down-projection quantises what it takes, or None: it does not, or was not read. As with a norm it is no part
    of what the MLP is, so equal ones may differ in it."""
    unquantised: str | None = of_kind("optional_text", default=None, eq=False, repr=False)
    "What the down-projection does instead, as a sentence, where it quantises and `quant` cannot say how."
    consumers: tuple[LinearSpec, ...] = of_kind("linears", default=(), eq=False, repr=False)
    "The down-projection, which reads the activation's result; empty where it was not read."


@frozen(kw_only=True, cache_hash=True)
class GatedMLPSpec(MLPSpec):
    """A gated MLP, `down(act(gate(x)) * up(x))` (arXiv 2002.05202): that of a dense decoder layer, or shared experts.

    Routed experts are none: their kernels run them all at once, and no linear of theirs stands alone (`ExpertsSpec`).
    """

    swiglu_limit: float | None = of_kind("optional_positive", converter=as_float)
    "The gate is clamped to at most this and up to within plus and minus this before the activation; None: neither is."
    gate_multiplier: float = of_kind("number", default=1.0, converter=as_float)
    "Factor on what the gate's projection gives, in front of the activation (Falcon-H1); 1 of nearly all models."
    down_multiplier: float = of_kind("number", default=1.0, converter=as_float)
    "Factor on what the down-projection gives, likewise."


@frozen(kw_only=True, cache_hash=True)
class ExpertsSpec(Checked):
    """A mixture of experts (arXiv 1701.06538) in the place of a decoder layer's MLP: its router, its experts, those that all tokens share.

    Ranks share whole experts (expert parallelism), the columns of each (tensor parallelism), or both. A size is None where nothing says
    it: a model's entry may declare its shared experts only, and engines pad.
    """

    path: str | None = of_kind("module_path")
    "Of its module, below the layer that holds it; None where it was declared."
    num_experts: int | None = optional_count()
    "Routed experts of the whole model: neither shared ones, nor copies that balance the load."
    num_local_experts: int | None = optional_count()
    "Routed experts that this rank holds, such copies among them."
    experts_per_token: int | None = optional_count()
    "Routed experts that each token passes."
    intermediate_size: int | None = optional_count()
    "Width between the projections of one expert in the whole model: of the gate alone, not of gate and up as engines merge them."
    local_intermediate_size: int | None = optional_count()
    "The same on this rank."
    weight: WeightSpec | None = of_kind("optional_weight")
    "How the experts hold their weights; None: in a way that is not known here."
    activation: ActivationQuant | str | None = of_kind("linear_activation")
    "What their kernel does to what it reads, as `LinearSpec.activation` says it; what it quantises, it quantises inside of itself."
    router: LinearSpec | None = of_kind("optional_linear")
    "What scores the experts; None where it was not read."
    shared: GatedMLPSpec | None = of_kind("optional_mlp")
    "The experts that every token passes, as the one MLP that they are built as. None: there are none, or they are run as routed ones."
    beside_mlp: bool = of_kind("flag", default=False, eq=False, repr=False)
    "Whether a dense MLP of the layer reads the norm too, as in LongCat-Flash: so it was declared. Of a layer that was read, its linears tell."

    @property
    def reads(self) -> tuple[LinearSpec | ExpertsSpec, ...]:
        """What of it reads the norm in front, without its shared experts: the router, and the routed experts at once."""
        return (self,) if self.router is None else (self.router, self)

    def shard(self, parallel: Parallel) -> ExpertsSpec:
        """The same mixture on one of several ranks. Whether they share whole experts or cut each, an engine decides, so that no local size is said.

        Raises:
            SpecError: the shared experts cannot be cut so.
        """
        shared = None if self.shared is None else self.shared.shard(parallel.size, parallel.rank)
        unsaid: dict[str, Any] = {"num_local_experts": None, "local_intermediate_size": None, "router": None}
        return attrs.evolve(self, shared=shared, **unsaid)

    def _contradictions(self) -> Iterator[str]:
        total, each = self.num_experts, self.experts_per_token
        if total is not None and each is not None and each > total:
            yield f"experts_per_token: expected at most num_experts {total}, got {each}"
        width, local = self.intermediate_size, self.local_intermediate_size
        if width is not None and local is not None and width % local:
            yield f"local_intermediate_size: {local} is no even share of intermediate_size {width}"
        scored = None if self.router is None else self.router.out_features
        if total is not None and scored is not None and scored < total:
            yield f"num_experts: expected at most the {scored} that the router scores, got {total}"


NESTED.update(optional_mlp=GatedMLPSpec, optional_experts=ExpertsSpec)


@frozen(kw_only=True)
class ResidualSpec(LayerSpec):
    """The residual stream through one decoder layer: the norms that read it, in pairs, one pair per attention block.

    Where no norm reads it there are none: those of OLMo-2 stand on what attention and MLP give, before it is added. Those of BERT
    stand behind the adds, and what they give is the stream from there on: `post_norms`.
    `parallel` is that of the attention block, whose output projection is what an all-reduce sums into the stream.
    """

    parallel_residual: bool = of_kind("flag", default=False)
    """Whether the MLP reads the stream as it enters the layer, beside the attention and not behind it, and what both give is added
    at once (GPT-J, GPT-NeoX, Falcon, Phi, Cohere)."""
    input_norms: tuple[NormSpec, ...] = of_kind("norms")
    "The norm of the stream that each attention block reads: one, two in LongCat-Flash, none in OLMo-2."
    post_attention_norms: tuple[NormSpec, ...] = of_kind("norms")
    """The norm of the stream that the MLP reads, after the attention's result was added: one per attention block. No norm of
    what the attention or the MLP gives, before it is added, is a field: Gemma 3 calls one of those post_attention_layernorm.
    With a `parallel_residual` nothing was added in front of it, and there is none where the MLP reads the input norm (GPT-J).
    Nor is there one in a layer of one block (Mamba-2, Nemotron-H), whose mixer or MLP reads the input norm."""
    post_norms: tuple[NormSpec, ...] = of_kind("norms", default=())
    """The norms behind the adds that give the stream itself, x = norm(x + f(x)): the attention's, then the MLP's (BERT, GPT-1). Their
    layers have no others."""
    mlp_ranks: int | None = of_kind("optional_count", default=None, eq=False, repr=False)
    """Over how many ranks what the layer's MLP or experts give is summed, or None: nothing says it. Attention and MLP of one
    layer may differ: transformers' plan for DeepSeek-V3 replicates the attention."""
    added_as_given: bool = of_kind("flag", default=True)
    """Whether what the attention and the MLP give is added to the stream as it is. Not where a norm (Gemma 3, OLMo-2) or a
    factor (MiniCPM3) stands in front of the add: no all-reduce can be fused with it then."""
    no_sum: str | None = of_kind("optional_text", default=None)
    """What stands in front of the norms, as a sentence, where that is no sum of one stream and one result: hyper-connections mix several
    streams (DeepSeek-V4, GLM-5.3, HY-V4, Qwen4), attention residuals several sums (AliceAI). No add is expected then, and only norms that
    the layer calls by themselves are listed. None: it is one."""
    starts_stream: bool | None = of_kind("optional_flag", default=None, eq=False, repr=False)
    """Whether the stream starts in this layer, so that its first input norm has no residual to add. A draft model's block does
    that too (multi-token prediction), though its `layer_index` counts on from the model's. None: nothing says it, and then
    layer 0 alone does. It is read off the layer's place in its model, by `specs_in`."""
    experts: ExpertsSpec | None = of_kind("optional_experts", default=None, eq=False, repr=False)
    "The mixture that reads the post-attention norm; None: an MLP does, or it was not read."
    undeclared: bool = of_kind("flag", default=False, eq=False, repr=False)
    "Whether the model's entry declares neither an MLP nor experts of this layer, so that what reads the post-attention norms is not known."
    gives: tuple[LinearSpec, ...] = of_kind("linears", default=(), eq=False, repr=False)
    "The linear whose result the layer adds last, a dense MLP's down_proj; empty of experts, and where it was not read."
    handed_over: bool = of_kind("flag", default=False, eq=False, repr=False)
    """Whether another rank of a pipeline hands the stream over to this layer. What joins it in front of the first input norm was
    summed over that rank's group, there. Read off like `starts_stream`."""

    def _of_other_ranks(self, parallel: Parallel) -> dict[str, Any]:
        mixture = {} if self.experts is None else {"experts": self.experts.shard(parallel)}
        return dict(_without_linears(self)) | mixture

    @property
    def adds_one(self) -> bool:
        """Whether one result at a time is added to the stream, as attention or MLP gave it: what an all-reduce can be fused with."""
        return self.added_as_given and not self.parallel_residual

    @property
    def is_one_block(self) -> bool:
        """Whether the layer is a mixer or an MLP alone, and one norm in front of it."""
        return bool(self.input_norms) and not self.post_attention_norms and not self.parallel_residual

    @property
    def input_norm(self) -> NormSpec | None:
        """The norm at the layer's entry, or None where no norm reads the stream."""
        return self.input_norms[0] if self.input_norms else None

    @property
    def post_attention_norm(self) -> NormSpec | None:
        """The norm between the first attention block and its MLP, or None where no norm reads the stream."""
        return self.post_attention_norms[0] if self.post_attention_norms else None

    def _contradictions(self) -> Iterator[str]:
        if self.post_norms and (self.input_norms or self.post_attention_norms or len(self.post_norms) != 2):
            yield f"post_norms: expected 2 and no others, got {len(self.post_norms)} beside {len(self.input_norms)} in front"
        alone = not self.post_attention_norms and (self.parallel_residual or len(self.input_norms) == 1)
        if len(self.input_norms) != len(self.post_attention_norms) and not alone:
            yield (
                f"post_attention_norms: expected one per input norm, got {len(self.post_attention_norms)} "
                f"for {len(self.input_norms)}"
            )
        if self.no_sum is not None and self.added_as_given:
            yield "added_as_given: expected false where no sum stands in front of the norms"
        elif not self.input_norms and not self.post_norms and self.added_as_given:
            # Forgotten, it would promise that an all-reduce is fused with the norm behind the next layer's add.
            yield "added_as_given: expected false where no norm reads the stream, as the layer's norms stand before its adds"
        for norm in (*self.input_norms, *self.post_attention_norms, *self.post_norms):
            if norm.width != self.hidden_size:
                yield f"a norm's width {norm.width} is not the hidden_size {self.hidden_size}"


@frozen(kw_only=True)
class FinalNormSpec(LayerSpec):
    """The norm after the last decoder layer, which the model itself holds and not a layer.

    `layer_index` is the number of decoder layers before it. A model says nothing of its sharding, so `parallel` is that of
    the last decoder layer, whose all-reduce comes before this norm.
    """

    final_norm: NormSpec = of_kind("norm")
    "The norm before the language-model head."
    no_sum: str | None = of_kind("optional_text", default=None)
    "As `ResidualSpec.no_sum`."

    def _contradictions(self) -> Iterator[str]:
        if self.final_norm.width != self.hidden_size:
            yield f"final_norm: width {self.final_norm.width} is not the hidden_size {self.hidden_size}"
