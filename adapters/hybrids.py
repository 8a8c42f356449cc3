"""Models that mix tokens with something else than attention, alone or beside it: Mamba-2, Mamba, short convolutions, recurrences.

All are transformers'; what each `forward` does was read in 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from . import vocabulary as words
from . import vocabulary_streams as streams
from .base import Adapter, Facts
from .layer_norm_parts import plain_mlp
from .sources import const, gated_norm, norm
from .specs import Mamba2Spec, OtherMixerSpec, ResidualSpec
from .vocabulary_mlps import TRANSFORMERS_MLP

NOT_AS_GIVEN: dict[str, Any] = {"added_as_given": const(False)}


@frozen
class Engine:
    """How the linears of an engine say their sizes, and its mixers where they stand."""

    given: str
    "What a linear gives in the whole model."
    tp: Mapping[str, str]
    "The words of the sharding -> where a last linear says it."
    index: Any
    "Where a mixer says its index."

    def index_at(self, mixer: str) -> Any:
        """Where the mixer at this path says it, in the words of facts."""
        return (
            f"{mixer}.{self.index}"
            if isinstance(self.index, str)
            else {**self.index, "path": f"{mixer}.{self.index['path']}"}
        )


HF = Engine("out_features", {"tp_weight": "in_features"}, "layer_idx")


def stream_of(
    engine: Engine,
    mixers: Mapping[str, tuple[Sequence[str], str]],
    norms: Sequence[Any],
    up: Sequence[str] = (),
    down: Sequence[str] = (),
    mixture: Sequence[str] = (),
    **more: Any,
) -> Facts:
    """A decoder layer that may have any of several mixers.

    Args:
        engine: whose classes they are.
        mixers: path -> the linears of it that read the norm in front, and its last one.
        norms: names, or norms; one of a layer of one block.
        up: what reads the second norm.
        down: what is added last, of a layer with an MLP.
        mixture: where experts may be.
        more: other words.
    """
    made = [norm(each) if isinstance(each, str) else each for each in norms]
    first = [f"{at}.{each}" for at, (reads, _) in mixers.items() for each in reads]
    last = [f"{at}.{out}" for at, (_, out) in mixers.items()]
    return Facts(
        ResidualSpec,
        {
            "hidden_size": [f"{each}.{engine.given}" for each in last],
            "layer_index": [engine.index_at(at) for at in mixers],
            **{word: [f"{each}.{says}" for each in last] for word, says in engine.tp.items()},
            "input_norms": [{**made[0], "consumers": first}],
            "post_attention_norms": [{**each, "consumers": list(up), "producers": last} for each in made[1:]],
            "last_linear": list(down) if made[1:] else last,
            **({"mixture": list(mixture)} if mixture else {}),
            **more,
        },
    )


def other(engine: Engine, mixer: str, out: str = "out_proj", **more: Any) -> Facts:
    """A mixer that has no spec of its own."""
    return Facts(
        OtherMixerSpec,
        {
            "mixer": const(mixer),
            "hidden_size": f"{out}.{engine.given}",
            "layer_index": engine.index,
            **{word: f"{out}.{says}" for word, says in engine.tp.items()},
            **more,
        },
    )


# ---- Mamba-2

GATE: dict[str, Any] = {"activation": const("silu"), "norm_before_gate": const(False), "consumers": ["out_proj"]}
"""What its gated norms have in common: the gate comes first."""

TRANSFORMERS_MAMBA2 = Facts(
    Mamba2Spec,
    {
        **{each: each for each in ("num_heads", "head_dim", "ssm_state_size", "conv_kernel_size", "hidden_size")},
        "num_groups": "n_groups",
        "layer_index": "layer_idx",
        "output_norm": gated_norm("norm", epsilon="variance_epsilon", group_size="group_size", **GATE),
        # Attributes stay the whole model's.
        "tp_weight": "out_proj.in_features",
    },
)
_FALCON_H1 = TRANSFORMERS_MAMBA2.but(
    output_norm=gated_norm(
        "norm",
        epsilon="variance_epsilon",
        **{**GATE, "norm_before_gate": "norm_before_gate"},
        group_size="weight.shape.0 / n_groups",
        where="mamba_rms_norm",
    )
)

# ---- transformers

_QKV = ("q_proj", "k_proj", "v_proj")
_MAMBA = {"mamba": (("in_proj",), "out_proj")}
_ATTENTION = {"self_attn": (_QKV, "o_proj")}
_CONV = {"conv": (("in_proj",), "out_proj")}
_FF = [f"feed_forward.{each}" for each in ("gate_proj", "up_proj")]
_FF_DOWN = ["feed_forward.down_proj"]
_PRE_FF = ("input_layernorm", "pre_ff_layernorm")
_W = ["feed_forward.w1", "feed_forward.w3"]

_BAMBA = stream_of(HF, {**_MAMBA, **_ATTENTION}, _PRE_FF, _FF, _FF_DOWN)
_GRANITE = stream_of(
    HF,
    {**_MAMBA, **_ATTENTION},
    ("input_layernorm", "post_attention_layernorm"),
    ["shared_mlp.input_linear"],
    ["shared_mlp.output_linear"],
    ["block_sparse_moe"],
    **NOT_AS_GIVEN,
)
_JAMBA = stream_of(HF, {**_MAMBA, **_ATTENTION}, _PRE_FF, _FF, _FF_DOWN, ["feed_forward"])
_MAMBA_BLOCK = stream_of(HF, {"mixer": (("in_proj",), "out_proj")}, ["norm"])
_LFM2 = stream_of(
    HF,
    {**_CONV, "self_attn": (_QKV, "out_proj")},
    ("operator_norm", "ffn_norm"),
    _W,
    ["feed_forward.w2"],
    ["feed_forward"],
)
_NEMOTRON_H_LAST = [f"mixer.{each}" for each in ("out_proj", "o_proj", "down_proj", "shared_experts.down_proj")]
_NEMOTRON_H = _MAMBA_BLOCK.but(
    hidden_size="norm.weight.shape.0",
    layer_index="layer_idx",
    tp_weight=[f"{each}.in_features" for each in _NEMOTRON_H_LAST],
    input_norms=[norm("norm", consumers=[f"mixer.{each}" for each in ("in_proj", *_QKV, "up_proj")])],
    last_linear=_NEMOTRON_H_LAST[:3],
    mixture=["mixer"],
)
_GRIFFIN_NORM = {"epsilon": "eps", "weight_offset": const(1.0)}
_GRIFFIN = stream_of(
    HF,
    {"temporal_block": (("linear_x", "linear_y", *_QKV), "linear_out")},
    [norm(each, **_GRIFFIN_NORM) for each in ("temporal_pre_norm", "channel_pre_norm")],
    ["mlp_block.gate_proj", "mlp_block.up_proj"],
    ["mlp_block.down_proj"],
    # Its recurrences keep no index.
    layer_index={"name_as": "name_index"},
    hidden_size="temporal_pre_norm.weight.shape.0",
    tp_weight=["temporal_block.linear_out.in_features", "temporal_block.o_proj.in_features"],
)
_RWKV = stream_of(
    HF,
    {"attention": (("key", "value", "receptance"), "output")},
    ("ln1", "ln2"),
    ["feed_forward.key", "feed_forward.receptance"],
    layer_index="layer_id",
    # Its norms' results are mixed with those of the token before, in front of the linears.
    input_norms=[norm("ln1")],
    post_attention_norms=[norm("ln2", producers=["attention.output"])],
)
_GRIFFIN_FINAL = streams.final_norm(_GRIFFIN, module="final_norm").but(hidden_size="final_norm.weight.shape.0")

MULTIPLIERS = {each: each for each in ("gate_multiplier", "down_multiplier")}
"""The factors of Falcon-H1's MLPs."""

_W_MLP = TRANSFORMERS_MLP.but(
    hidden_size="w2.out_features",
    intermediate_size="w2.in_features",
    activation=const("silu"),
    quant="w2",
    tp_weight=["w2.in_features", "w1.out_features"],
)
_TRANSFORMERS: dict[str, Facts | tuple[Facts, ...]] = {
    "BambaAttention": words.TRANSFORMERS_GQA,
    "BambaDecoderLayer": _BAMBA,
    "BambaMLP": TRANSFORMERS_MLP,
    "BambaMixer": TRANSFORMERS_MAMBA2,
    "BambaModel": streams.final_norm(_BAMBA, module="final_layernorm"),
    "FalconH1Attention": words.TRANSFORMERS_GQA,
    # A factor stands between its input norm and what reads that.
    "FalconH1DecoderLayer": _BAMBA.but(**NOT_AS_GIVEN, input_norms=[norm("input_layernorm")]),
    "FalconH1MLP": TRANSFORMERS_MLP.but(**MULTIPLIERS),
    "FalconH1Mixer": _FALCON_H1,
    "FalconH1Model": streams.final_norm(_BAMBA, module="final_layernorm"),
    "FalconMambaBlock": _MAMBA_BLOCK,
    "FalconMambaMixer": other(HF, "mamba"),
    "FalconMambaModel": streams.final_norm(_MAMBA_BLOCK, module="norm_f"),
    "GraniteMoeHybridAttention": words.TRANSFORMERS_GQA,
    "GraniteMoeHybridDecoderLayer": _GRANITE,
    "GraniteMoeHybridMLP": TRANSFORMERS_MLP.but(
        hidden_size="output_linear.out_features",
        intermediate_size="output_linear.in_features",
        activation="activation",
        quant="output_linear",
        tp_weight="output_linear.in_features",
    ),
    "GraniteMoeHybridMambaLayer": TRANSFORMERS_MAMBA2,
    "GraniteMoeHybridModel": streams.final_norm(_GRANITE),
    "JambaAttention": words.TRANSFORMERS_GQA,
    "JambaAttentionDecoderLayer": _JAMBA,
    "JambaMLP": TRANSFORMERS_MLP,
    "JambaMambaDecoderLayer": _JAMBA,
    "JambaMambaMixer": other(HF, "mamba"),
    "JambaModel": streams.final_norm(_JAMBA, module="final_layernorm"),
    "Lfm2Attention": words.TRANSFORMERS_GQA.but(tp_weight="out_proj.in_features"),
    "Lfm2DecoderLayer": _LFM2,
    "Lfm2MLP": _W_MLP,
    "Lfm2Model": streams.final_norm(_LFM2, module="embedding_norm"),
    "Lfm2ShortConv": other(HF, "short convolution"),
    "Mamba2Block": _MAMBA_BLOCK,
    "Mamba2Mixer": TRANSFORMERS_MAMBA2,
    "Mamba2Model": streams.final_norm(_MAMBA_BLOCK, module="norm_f"),
    "MambaBlock": _MAMBA_BLOCK,
    "MambaMixer": other(HF, "mamba"),
    "MambaModel": streams.final_norm(_MAMBA_BLOCK, module="norm_f"),
    "NemotronHAttention": words.TRANSFORMERS_GQA,
    "NemotronHBlock": _NEMOTRON_H,
    "NemotronHMLP": plain_mlp("up_proj", "down_proj", "act_fn"),
    "NemotronHMamba2Mixer": TRANSFORMERS_MAMBA2,
    "NemotronHModel": streams.final_norm(_NEMOTRON_H, module="norm_f"),
    "RecurrentGemmaAttention": words.TRANSFORMERS_GQA.but(sliding_window="sliding_window"),
    "RecurrentGemmaDecoderLayer": _GRIFFIN,
    "RecurrentGemmaMlp": TRANSFORMERS_MLP,
    "RecurrentGemmaModel": _GRIFFIN_FINAL,
    "RecurrentGemmaRecurrentBlock": other(HF, "recurrence", "linear_out", layer_index={"name_as": "name_index"}),
    "RwkvBlock": _RWKV,
    "RwkvModel": streams.final_norm(_RWKV, "blocks", "ln_out"),
    "RwkvSelfAttention": other(HF, "rwkv", "output", layer_index="layer_id"),
}

HYBRIDS = Adapter("hybrids", layers={f"transformers:{name}": facts for name, facts in _TRANSFORMERS.items()})
