"""The kinds of layer of a models.toml entry that are no attention: Mamba-2, mixers without a spec of their own, an MLP alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from attrs import frozen

from ..adapters.specs import GatedMLPSpec, GatedNormSpec, Mamba2Spec, MLPSpec, OtherMixerSpec
from .kind_words import At, StreamNorms, whole

if TYPE_CHECKING:
    from .kinds import Around


@frozen(kw_only=True)
class Mamba2Kind:
    """State-space layers of Mamba-2."""

    family: Literal["mamba2"]
    num_heads: int
    "Heads of the whole model."
    head_dim: int
    "Width of one head."
    ssm_state_size: int
    "Width of the state of one channel."
    num_groups: int
    "Groups of heads that share B and C."
    conv_kernel_size: int
    "Taps of the short convolution."
    output_norm: Literal["gate_before_norm", "norm_before_gate", "none"]
    "The gated norm before the output projection, by its order; its gate passes through silu. none: the gate alone."
    at: At = "all"
    'Which decoder layers, 0-based: "all", "rest", a list, or {start, step}.'
    beside_attention: bool = False
    """true: in these layers it reads the norm that an attention reads too, which another kind declares (Falcon-H1). Each multiplies what it
    reads by a factor, so that no quantisation joins the norm."""
    output_norm_eps: float | None = None
    "Epsilon of the gated norm, where it is not the model's rms_norm_eps."
    stream_norms: StreamNorms = None
    """Only where others than two norms read the residual stream in these layers. "none": they stand on what mixer and MLP give.
    "one": the layer is this alone, with a norm in front, and no MLP (Mamba-2, Nemotron-H)."""

    def spec(self, around: Around) -> Mamba2Spec:
        """The spec of one such layer, whole."""
        width, groups = self.num_heads * self.head_dim, max(self.num_groups, 1)
        norm = None
        # Heads that the groups do not divide are reported by the spec, without a norm.
        if self.output_norm != "none" and width > 0 and self.num_heads % groups == 0:
            norm = GatedNormSpec(
                width=width,
                epsilon=around.epsilon("output_norm_eps", self.output_norm_eps),
                activation="silu",
                norm_before_gate=self.output_norm == "norm_before_gate",
                group_size=width // groups,
            )
        return whole(Mamba2Spec, self, **around.common, output_norm=norm)


@frozen(kw_only=True)
class OtherKind:
    """Layers whose mixer has no spec of its own: only the norms of their stream are known, so that they have a plan all the same."""

    family: Literal["other"]
    mixer: str
    'What it is, in the words of the adapter that reads such layers: "mamba", "short convolution".'
    at: At = "all"
    'Which decoder layers, 0-based: "all", "rest", a list, or {start, step}.'
    stream_norms: StreamNorms = None
    """Only where others than two norms read the residual stream in these layers. "none": they stand on what mixer and MLP give.
    "one": the layer is this alone, with a norm in front, and no MLP (Mamba)."""

    def spec(self, around: Around) -> OtherMixerSpec:
        """The spec of one such layer, whole."""
        return whole(OtherMixerSpec, self, **around.common)


@frozen(kw_only=True)
class MLPBlockKind:
    """Layers of one block that are an MLP, or the experts that all tokens share beside routed ones, with one norm in front (Nemotron-H)."""

    family: Literal["mlp"]
    intermediate_size: int
    "Width between the projections."
    activation: Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2"]
    "What stands between the projections; of a gated one, what the gate passes through."
    gated: bool
    "Whether a gate multiplies it."
    at: At = "all"
    'Which decoder layers, 0-based: "all", "rest", a list, or {start, step}.'
    shared_experts: bool = False
    "Whether routed experts stand beside it."

    stream_norms: ClassVar[StreamNorms] = "one"

    def spec(self, around: Around) -> MLPSpec:
        """The spec of one such layer, whole."""
        if self.gated:
            return whole(GatedMLPSpec, self, **around.common, swiglu_limit=None)
        return whole(MLPSpec, self, **around.common)
