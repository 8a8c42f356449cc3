"""The kinds of layer that a models.toml entry declares, attention and gated MLPs, each of which becomes a spec.

The words are the specs' own field names; what a published config leaves to be derived is derived here, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from attrs import frozen

from ..adapters.spec_fields import made
from ..adapters.specs import (
    NO_ROPE,
    ExpertsSpec,
    GatedDeltaNetSpec,
    GatedMLPSpec,
    GatedNormSpec,
    GQASpec,
    MLASpec,
    NormSpec,
    RopeSpec,
)
from .kind_words import At, GateWords, Rope, StreamNorms, Yarn, whole
from .mixer_kinds import Mamba2Kind, MLPBlockKind, OtherKind


def _rope_of(said: Rope, width: int) -> RopeSpec | None:
    """The rope of so many columns, unless it says how many."""
    if said is None:
        return None
    if said == "none" or width == 0:
        return NO_ROPE
    read = {"interleaved": said.interleaved, "attention_scaling": said.attention_scaling}
    return made(RopeSpec, {"width": width if said.width is None else said.width, **read})


@frozen(kw_only=True)
class MLAKind:
    """Layers of multi-head latent attention."""

    family: Literal["mla"]
    num_heads: int
    "Query heads of the whole model."
    q_lora_rank: int | Literal["none"]
    'Width of the query latent; "none": queries are projected directly.'
    kv_lora_rank: int
    "Width of the key/value latent."
    qk_nope_head_dim: int
    "Per-head query/key width without rotary embedding."
    qk_rope_head_dim: int
    "Width of the shared rotary key part."
    v_head_dim: int
    "Per-head value width."
    at: At = "all"
    'Which decoder layers, 0-based: "all", "rest", a list, or {start, step}.'
    yarn: Yarn | None = None
    "The yarn correction of the softmax scale, if the model has one."
    softmax_scale: float | None = None
    "Only where it is not qk_head_dim ** -0.5 times the yarn correction squared."
    rope: Rope = None
    'How the rope columns are turned; "none": they are not. Left out: nothing is said of it.'
    latent_norm_eps: float | None = None
    "Epsilon of both latent norms, where it is not the model's rms_norm_eps."
    stream_norms: StreamNorms = None
    """Only where others than two norms read the residual stream in these layers. "none": they stand on what attention and MLP give.
    "one": the layer is this alone, with a norm in front, and no MLP (Nemotron-H)."""

    def spec(self, around: Around) -> MLASpec:
        """The spec of one such layer, whole."""
        q_lora_rank = None if self.q_lora_rank == "none" else self.q_lora_rank
        eps = around.epsilon("latent_norm_eps", self.latent_norm_eps)
        scale = self.softmax_scale
        if scale is None:
            mscale = 1.0 if self.yarn is None else self.yarn.mscale
            width = self.qk_nope_head_dim + self.qk_rope_head_dim
            # A width that is no width is reported by the spec, with the field's name.
            scale = max(width, 1) ** -0.5 * mscale * mscale
        return whole(
            MLASpec,
            self,
            **around.common,
            q_lora_rank=q_lora_rank,
            q_norm=None if q_lora_rank is None else made(NormSpec, {"width": q_lora_rank, "epsilon": eps}),
            kv_norm=made(NormSpec, {"width": self.kv_lora_rank, "epsilon": eps}),
            softmax_scale=scale,
            rope=_rope_of(self.rope, self.qk_rope_head_dim),
        )


@frozen(kw_only=True)
class GatedDeltaNetKind:
    """Layers of a gated delta net (Qwen) or Kimi delta attention."""

    family: Literal["gated_delta_net"]
    num_k_heads: int
    "Key heads of the whole model."
    num_v_heads: int
    "Value heads of the whole model."
    head_k_dim: int
    "Width of one key head."
    head_v_dim: int
    "Width of one value head."
    conv_kernel_size: int
    "Taps of the short convolution."
    output_norm: GateWords
    "The gated norm before the output projection."
    at: At = "all"
    'Which decoder layers, 0-based: "all", "rest", a list, or {start, step}.'
    output_norm_eps: float | None = None
    "Epsilon of the gated norm, where it is not the model's rms_norm_eps."
    stream_norms: StreamNorms = None
    """Only where others than two norms read the residual stream in these layers. "none": they stand on what attention and MLP give.
    "one": the layer is this alone, with a norm in front, and no MLP (Nemotron-H)."""

    def spec(self, around: Around) -> GatedDeltaNetSpec:
        """The spec of one such layer, whole."""
        gate = self.output_norm
        norm = GatedNormSpec(
            width=self.head_v_dim,
            epsilon=around.epsilon("output_norm_eps", self.output_norm_eps),
            activation=gate.activation,
            norm_before_gate=gate.norm_before_gate,
            group_size=None if gate.group_size == "none" else gate.group_size,
        )
        return whole(GatedDeltaNetSpec, self, **around.common, output_norm=norm)


@frozen(kw_only=True)
class GQAKind:
    """Layers of grouped-query attention."""

    family: Literal["gqa"]
    num_heads: int
    "Query heads of the whole model."
    num_kv_heads: int
    "Key/value heads of the whole model."
    head_dim: int
    "Width of one query or key head."
    sliding_window: int | Literal["off"]
    'Tokens a query sees, itself included; "off": all of them.'
    has_sinks: bool
    "Whether each query head has a learned sink logit."
    at: At = "all"
    'Which decoder layers, 0-based: "all", "rest", a list, or {start, step}.'
    v_head_dim: int | None = None
    "Width of one value head, where it is not head_dim."
    softmax_scale: float | None = None
    "Only where it is not head_dim ** -0.5."
    shares_kv: bool = False
    "Whether these layers read the keys and values that an earlier layer made (Gemma 4), and make none."
    values_are_keys: bool = False
    "Whether their values are what the key projection gives (Gemma 4)."
    qk_norms: bool = False
    "Whether each query and key head is normed, with the model's rms_norm_eps and norm_weight_offset. Said together with rope."
    rope: Rope = None
    'How query and key are turned; "none": they are not. Left out: nothing is said of it.'
    stream_norms: StreamNorms = None
    """Only where others than two norms read the residual stream in these layers. "none": they stand on what attention and MLP give.
    "one": the layer is this alone, with a norm in front, and no MLP (Nemotron-H)."""

    def spec(self, around: Around) -> GQASpec:
        """The spec of one such layer, whole."""
        return whole(
            GQASpec,
            self,
            **around.common,
            v_head_dim=self.head_dim if self.v_head_dim is None else self.v_head_dim,
            softmax_scale=max(self.head_dim, 1) ** -0.5 if self.softmax_scale is None else self.softmax_scale,
            sliding_window=None if self.sliding_window == "off" else self.sliding_window,
            q_norm=self._norm(around),
            k_norm=self._norm(around),
            rope=_rope_of(self.rope, self.head_dim),
        )

    def _norm(self, around: Around) -> NormSpec | None:
        eps, offset = around.rms_norm_eps, around.norm_weight_offset
        if around.engine.rms_norm_eps is not None:
            eps = around.engine.rms_norm_eps
        words = {"width": self.head_dim, "epsilon": eps, "weight_offset": offset}
        return made(NormSpec, words) if self.qk_norms else None


LayerKind: TypeAlias = MLAKind | GatedDeltaNetKind | GQAKind | Mamba2Kind | OtherKind | MLPBlockKind
KINDS: Mapping[str, type[Any]] = {
    "mla": MLAKind,
    "gated_delta_net": GatedDeltaNetKind,
    "gqa": GQAKind,
    "mamba2": Mamba2Kind,
    "other": OtherKind,
    "mlp": MLPBlockKind,
}
"""The kinds of layer by the `family` word that tells them apart."""

SHARED_EXPERTS = "shared_experts"
"""What the MLPs of mixtures are called in `mlps`. What a kind of any other name claims is a dense layer."""


@frozen(kw_only=True)
class MLPKind:
    """Gated MLPs: those of dense decoder layers, or the shared experts of mixtures."""

    intermediate_size: int
    "Width between the projections; of several shared experts, which engines build as one, their sum."
    activation: Literal["silu", "gelu", "gelu_tanh", "relu2", "situ"]
    "What the gate passes through."
    at: At = "all"
    'Which decoder layers, 0-based: "all", "rest", a list, or {start, step}. The others have none.'
    swiglu_limit: float | None = None
    "What gate and up are clamped to, where the model does that."
    gate_multiplier: float = 1.0
    "Factor on the gate in front of the activation (Falcon-H1)."
    down_multiplier: float = 1.0
    "Factor on what the down-projection gives (Falcon-H1)."

    def spec(self, common: Mapping[str, Any]) -> GatedMLPSpec:
        """The spec of one such MLP, whole."""
        return whole(GatedMLPSpec, self, **common)


@frozen(kw_only=True)
class ExpertsKind:
    """The routed experts of a model's mixtures, which are alike in all of its layers."""

    num_experts: int
    "Routed experts: neither shared ones, nor those that give back what they are given (LongCat's zero experts)."
    experts_per_token: int
    "Routed experts that each token passes."
    intermediate_size: int
    "Width between the projections of one expert."
    at: At = "rest"
    'Which decoder layers, 0-based: a list, {start, step}, "all", or "rest", those where no dense MLP is declared.'

    def spec(self, shared: GatedMLPSpec | None, *, beside_mlp: bool) -> ExpertsSpec:
        """The spec of one such mixture, whole."""
        return whole(ExpertsSpec, self, shared=shared, beside_mlp=beside_mlp, **_UNSAID)


def experts_around(shared: GatedMLPSpec | None) -> ExpertsSpec:
    """The mixture that a model's entry says no more of than its shared experts."""
    names = ("num_experts", "num_local_experts", "experts_per_token", "intermediate_size", "local_intermediate_size")
    sizes: dict[str, Any] = dict.fromkeys(names)
    return ExpertsSpec(shared=shared, **_UNSAID, **sizes)


_UNSAID: dict[str, Any] = dict.fromkeys(("path", "weight", "activation", "router"))


EPSILONS = {"rms_norm_eps": "decoder norms", "latent_norm_eps": "latent norms", "output_norm_eps": "output norms"}
"""The epsilons that an engine may have of its own, in words."""

ENGINES = ("transformers", "vllm", "sglang", "atom")
"""The engines whose layers are known."""


@frozen(kw_only=True)
class EngineFacts:
    """Where one engine builds the model otherwise than its published config says."""

    rms_norm_eps: float | None = None
    "Epsilon of the decoder layers' norms and the final norm."
    latent_norm_eps: float | None = None
    "Epsilon of the MLA latent norms: transformers ignores the config here, and uses 1e-6."
    output_norm_eps: float | None = None
    "Epsilon of the gated norm of a delta net."
    replicates_kv_heads: bool = True
    "false: the engine only divides the key/value heads, and cannot build the model on more ranks than there are."


@frozen(kw_only=True)
class Around:
    """What a layer's spec takes from the model around it."""

    common: Mapping[str, Any]
    rms_norm_eps: float
    norm_weight_offset: float
    engine: EngineFacts

    def epsilon(self, name: str, declared: float | None) -> float:
        """The engine's epsilon if it has one of its own, else the declared one, else the model's."""
        own: float | None = getattr(self.engine, name)
        if own is not None:
            return own
        return self.rms_norm_eps if declared is None else declared
