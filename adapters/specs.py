"""The spec types: what a layer is, in one language.

Frozen, slotted, keyword-only attrs classes. Head counts come in pairs, the whole model's and this rank's; validation
ties them together with the tensor-parallel degree, and reports every contradiction at once.

Field names are those of the published Hugging Face configs. All counts and widths are in elements, never bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, ClassVar, Self, TypeAlias

import attrs
from attrs import field, frozen

from .errors import InnerLayerError, SpecError, shown

LARGEST = 2**31 - 1
"""The largest count or width accepted: kernels index with int32, and more than that is a typing error."""


# ---- what a single field may hold ------------------------------------------------------------------------------------
# The kind is data on the field, so that reading a layer, structuring TOML and validating all follow the same table.


def _kind(kind: str, *, goes_with: str | None = None, **kwargs: Any) -> Any:
    return field(metadata={"kind": kind, "goes_with": goes_with}, **kwargs)


def count() -> Any:
    """A whole number of at least 1: heads, widths."""
    return _kind("count")


def width_or_zero() -> Any:
    """A whole number of at least 0: a rope dimension may be 0 (no rope at all)."""
    return _kind("width_or_zero")


def optional_count() -> Any:
    """A count, or None where the architecture has no such thing. None is an answer, not a gap."""
    return _kind("optional_count")


def goes_with(attribute: attrs.Attribute[Any]) -> str | None:
    """The field whose None makes this one None too (the query norm goes with the query latent)."""
    partner: str | None = attribute.metadata.get("goes_with")
    return partner


def kind_of(attribute: attrs.Attribute[Any]) -> str:
    """The kind a spec field was declared with."""
    kind: str = attribute.metadata["kind"]
    return kind


def _problem(kind: str, value: Any) -> str | None:
    """Why `value` is no legal value of this kind, or None if it is."""
    if kind in ("count", "optional_count", "width_or_zero", "index", "window"):
        if value is None and kind in ("optional_count", "window"):
            return None
        least = 0 if kind in ("width_or_zero", "index") else 1
        if type(value) is not int:
            return f"expected a whole number, got {shown(value)} ({type(value).__name__})"
        if value < least:
            return f"expected at least {least}, got {shown(value)}"
        if value > LARGEST:
            return f"expected at most {LARGEST}, got {shown(value)}"
        return None
    if kind in ("positive", "number"):
        # What `_float` could not convert is no number, or one beyond every float.
        if type(value) is not float or not math.isfinite(value):
            return f"expected a finite number, got {shown(value)}"
        if kind == "positive" and value <= 0:
            return f"expected more than 0, got {value!r}"
        return None
    if kind == "flag":
        return None if type(value) is bool else f"expected true or false, got {shown(value)}"
    if kind == "activation":
        fine = type(value) is str and value in ACTIVATIONS
        return None if fine else f"expected one of {', '.join(ACTIVATIONS)}, got {shown(value)}"
    expected = _NESTED[kind]
    if value is None and kind == "optional_norm":
        return None
    if kind == "norms":
        fine = type(value) is tuple and value and all(isinstance(norm, NormSpec) for norm in value)
        return None if fine else f"expected a non-empty tuple of NormSpec, got {shown(value)}"
    return None if isinstance(value, expected) else f"expected {expected.__name__}, got {shown(value)}"


def _float(value: Any) -> Any:
    try:
        return float(value) if type(value) is int else value
    except OverflowError:
        return value


@frozen(kw_only=True)
class _Checked:
    """Runs the per-field checks, then the cross-field ones, and raises all problems as one SpecError."""

    def __attrs_post_init__(self) -> None:
        wrong = {
            a.name: problem
            for a in attrs.fields(type(self))
            if (problem := _problem(kind_of(a), getattr(self, a.name))) is not None
        }
        # Cross-field rules only make sense on legal values.
        problems = [f"{name}: {problem}" for name, problem in wrong.items()] or list(self._contradictions())
        if problems:
            raise SpecError(type(self).__name__, problems)

    def _contradictions(self) -> Iterator[str]:
        yield from ()


# ---- parallelism and norms -------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class Parallel(_Checked):
    """The tensor-parallel degree this layer was actually sharded by, which need not be the engine's global one."""

    size: int = count()
    "Ranks that share the layer's heads; 1 when the layer is whole or replicated."
    rank: int | None = _kind("rank")
    "This rank, 0-based, or None where a sharded layer does not say which shard it is."

    def __attrs_post_init__(self) -> None:
        problem = _problem("count", self.size)
        if problem is not None:
            raise SpecError("Parallel", [f"size: {problem}"])
        if self.rank is None:
            if self.size == 1:
                raise SpecError("Parallel", ["rank: the only rank of a size of 1 is 0, got None"])
        elif type(self.rank) is not int or not 0 <= self.rank < self.size:
            raise SpecError(
                "Parallel", [f"rank: expected 0 to {self.size - 1}, or None if unknown, got {shown(self.rank)}"]
            )


WHOLE = Parallel(size=1, rank=0)
"""A layer that is not sharded."""

ACTIVATIONS = ("silu", "sigmoid")
"""Output-gate activations of gated norms: silu for Qwen, sigmoid for Kimi and GLM."""


@frozen(kw_only=True)
class NormSpec(_Checked):
    """One RMSNorm over the last dimension: `x / sqrt(mean(x^2) + epsilon) * (weight + weight_offset)`."""

    width: int = count()
    "Elements that share one variance: the last dimension of input and weight."
    epsilon: float = _kind("positive", converter=_float)
    "As the norm module holds it. Engines disagree with the config, and with each other, about it."
    weight_offset: float = _kind("number", converter=_float, default=0.0)
    "Added to the stored weight: 1.0 for zero-centred norms (Gemma, Qwen3-Next), else 0.0."


@frozen(kw_only=True)
class GatedNormSpec(NormSpec):
    """An RMSNorm whose output (or input) is multiplied by an activated gate of the same shape."""

    activation: str = _kind("activation")
    "What the gate passes through. Not the layer's `activation`, which is that of the convolution."
    norm_before_gate: bool = _kind("flag")
    "True: norm(x) * act(gate). False: norm(x * act(gate))."
    group_size: int | None = optional_count()
    "Elements per variance group, or None where the whole width is one group."

    def _contradictions(self) -> Iterator[str]:
        if self.group_size is not None and self.width % self.group_size:
            yield f"group_size {self.group_size} does not divide the width {self.width}"


_NESTED: dict[str, type] = {
    "parallel": Parallel,
    "norm": NormSpec,
    "norms": NormSpec,
    "optional_norm": NormSpec,
    "gated_norm": GatedNormSpec,
    "text": str,
}


# ---- how heads are shared by ranks -----------------------------------------------------------------------------------


def shard_heads(total: int, size: int) -> int:
    """Heads per rank where every rank must get the same whole number of them.

    Raises:
        SpecError: the ranks do not divide the heads.
    """
    if total % size:
        raise SpecError("heads per rank", [f"{shown(total)} heads cannot be shared equally by {size} ranks"])
    return total // size


def shard_kv_heads(total: int, size: int) -> int:
    """KV heads per rank; with more ranks than heads each head is replicated, so that no rank holds fewer than one.

    Raises:
        SpecError: neither number divides the other.
    """
    if size > total:
        if size % total:
            raise SpecError(
                "KV heads per rank", [f"{shown(total)} KV heads cannot be replicated evenly over {size} ranks"]
            )
        return 1
    if total % size:
        raise SpecError("KV heads per rank", [f"{shown(total)} KV heads cannot be shared equally by {size} ranks"])
    return total // size


@frozen(kw_only=True)
class HeadPair:
    """A total count, its per-rank partner, and the rule that ties them."""

    total: str
    local: str
    replicates: bool
    "True for KV heads: more ranks than heads means copies, not an error."

    def local_of(self, total: int, size: int) -> int:
        """This rank's count, from the model's."""
        return shard_kv_heads(total, size) if self.replicates else shard_heads(total, size)


@frozen(kw_only=True)
class LayerSpec(_Checked):
    """What every outer layer knows of itself."""

    pairs: ClassVar[tuple[HeadPair, ...]] = ()
    "The head counts of this kind of layer, total and local."

    hidden_size: int = count()
    "Width of the residual stream the layer reads and writes."
    layer_index: int = _kind("index")
    "0-based, as the layer itself counts: LongCat's two attentions per decoder layer count on, 0 to 55."
    parallel: Parallel = _kind("parallel")
    "Degree and rank this layer was sharded by."

    def shard(self, size: int, rank: int | None = None) -> Self:
        """The same layer on one of `size` ranks (rank 0 unless given).

        Raises:
            SpecError: the heads cannot be shared by that many ranks, or there is no such rank.
        """
        parallel = Parallel(size=size, rank=0 if rank is None else rank)
        local: dict[str, int] = {}
        problems: list[str] = []
        for pair in self.pairs:
            try:
                local[pair.local] = pair.local_of(getattr(self, pair.total), size)
            except SpecError as error:
                problems.extend(error.problems)
        if problems:
            raise SpecError(f"{type(self).__name__} at tensor-parallel size {size}", problems)
        return attrs.evolve(self, parallel=parallel, **local)

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
    q_norm: NormSpec | None = _kind("optional_norm", goes_with="q_lora_rank")
    "Norm of the query latent; None exactly when q_lora_rank is None."
    kv_norm: NormSpec = _kind("norm")
    "Norm of the key/value latent."
    softmax_scale: float = _kind("positive", converter=_float)
    "Factor on the attention logits, long-context correction (yarn mscale squared) included."

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
    output_norm: GatedNormSpec = _kind("gated_norm")
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
    softmax_scale: float = _kind("positive", converter=_float)
    "Factor on the attention logits."
    sliding_window: int | None = _kind("window")
    "Tokens a query sees, itself included, or None where it sees all."
    has_sinks: bool = _kind("flag")
    "Whether each query head has a learned sink logit in the softmax."

    @property
    def num_kv_head_replicas(self) -> int:
        """Ranks that hold a copy of the same KV head."""
        return max(1, self.parallel.size // self.num_kv_heads)

    def _contradictions(self) -> Iterator[str]:
        yield from LayerSpec._contradictions(self)
        if self.num_heads % self.num_kv_heads:
            yield f"num_heads: {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}"


@frozen(kw_only=True)
class ResidualSpec(LayerSpec):
    """The residual stream through one decoder layer: the norms it meets, in pairs, one pair per attention block.

    `parallel` is that of the attention block, whose output projection is what an all-reduce sums into the stream.
    """

    input_norms: tuple[NormSpec, ...] = _kind("norms")
    "The norm before each attention block: one, or two in LongCat-Flash."
    post_attention_norms: tuple[NormSpec, ...] = _kind("norms")
    "The norm after each attention block, before the MLP."

    @property
    def input_norm(self) -> NormSpec:
        """The norm at the layer's entry."""
        return self.input_norms[0]

    @property
    def post_attention_norm(self) -> NormSpec:
        """The norm between the first attention block and its MLP."""
        return self.post_attention_norms[0]

    def _contradictions(self) -> Iterator[str]:
        if len(self.input_norms) != len(self.post_attention_norms):
            yield (
                f"post_attention_norms: expected one per input norm, got {len(self.post_attention_norms)} "
                f"for {len(self.input_norms)}"
            )
        for norm in (*self.input_norms, *self.post_attention_norms):
            if norm.width != self.hidden_size:
                yield f"a norm's width {norm.width} is not the hidden_size {self.hidden_size}"


# ---- inner kernel layers ---------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class KernelSpec(_Checked):
    """An inner layer that only launches the attention kernel.

    It holds what the kernel is handed, per rank. What it cannot know (norms, hidden size, the whole model's heads) is
    not a field here, and asking for it raises an InnerLayerError that names the layer to ask instead.
    """

    layer_index: int = _kind("index")
    "0-based, as the layer itself counts."
    outer: str = _kind("text")
    "The layer that knows the rest, in words."

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in _OUTER_FIELDS:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}", name=name, obj=self)
        raise InnerLayerError(name, type(self).__name__, self.outer)


@frozen(kw_only=True)
class MLAKernelSpec(KernelSpec):
    """The kernel layer inside an MLA layer (vLLM and ATOM `MLAAttention`)."""

    num_local_heads: int = count()
    "Query heads of this rank."
    q_lora_rank: int | None = optional_count()
    "As in MLASpec."
    kv_lora_rank: int = count()
    "As in MLASpec."
    qk_nope_head_dim: int = count()
    "As in MLASpec."
    qk_rope_head_dim: int = width_or_zero()
    "As in MLASpec."
    v_head_dim: int = count()
    "As in MLASpec."
    softmax_scale: float = _kind("positive", converter=_float)
    "As in MLASpec."

    @property
    def latent_width(self) -> int:
        """Width of one token's cache entry: kv_lora_rank + qk_rope_head_dim."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@frozen(kw_only=True)
class GQAKernelSpec(KernelSpec):
    """The kernel layer inside a softmax-attention layer (vLLM and ATOM `Attention`, SGLang `RadixAttention`).

    Inside SGLang's MLA layer it describes the absorbed form: one KV head, `head_dim` kv_lora_rank + rope.
    """

    num_local_heads: int = count()
    "Query heads of this rank."
    num_local_kv_heads: int = count()
    "Key/value heads of this rank."
    head_dim: int = count()
    "Width of one query or key head as the kernel sees it."
    v_head_dim: int = count()
    "Width of one value head as the kernel sees it."
    softmax_scale: float = _kind("positive", converter=_float)
    "Factor on the attention logits."
    sliding_window: int | None = _kind("window")
    "Tokens a query sees, itself included, or None where it sees all."


@frozen(kw_only=True)
class GatedDeltaNetKernelSpec(KernelSpec):
    """The kernel layer inside a gated delta net (SGLang `RadixLinearAttention`)."""

    num_local_k_heads: int = count()
    "Key heads of this rank."
    num_local_v_heads: int = count()
    "Value heads of this rank."
    head_k_dim: int = count()
    "Width of one key head."
    head_v_dim: int = count()
    "Width of one value head."


AttentionSpec: TypeAlias = MLASpec | GatedDeltaNetSpec | GQASpec
AnySpec: TypeAlias = (
    MLASpec | GatedDeltaNetSpec | GQASpec | ResidualSpec | MLAKernelSpec | GQAKernelSpec | GatedDeltaNetKernelSpec
)

FAMILIES: dict[str, type[Any]] = {
    "mla": MLASpec,
    "gated_delta_net": GatedDeltaNetSpec,
    "gqa": GQASpec,
    "residual": ResidualSpec,
    "mla_kernel": MLAKernelSpec,
    "gqa_kernel": GQAKernelSpec,
    "gated_delta_net_kernel": GatedDeltaNetKernelSpec,
}
"""The families by the name that declarations use."""

FAMILY_OF: dict[type[Any], str] = {spec: name for name, spec in FAMILIES.items()}

_OUTER_FIELDS = frozenset(
    {a.name for spec in (MLASpec, GatedDeltaNetSpec, GQASpec, ResidualSpec) for a in attrs.fields(spec)}
    | {"qk_head_dim", "split_sizes", "gated_norm_shape", "conv_dim", "input_norm", "post_attention_norm"}
)
