"""SGLang's models that mix tokens with something else than attention, by the file; what each `forward` does was read in SGLang 0.5.23."""

from __future__ import annotations

from typing import Any

from . import vocabulary_streams as streams
from .base import Adapter
from .hybrids import NOT_AS_GIVEN, Engine, stream_of
from .sglang_decoders import FILES, attention
from .sources import norm
from .vllm_hybrids import VLLM_MAMBA2

_EPSILON: dict[str, Any] = {"epsilon": "variance_epsilon"}
_LASTS = ("mamba.out_proj", "self_attn.o_proj")

_MAMBA2 = VLLM_MAMBA2.but(
    # It keeps its taps in its convolution alone, which is a linear.
    conv_kernel_size="conv1d.input_size",
    tp_rank="tp_rank",
)
_GRANITE = stream_of(
    Engine("output_size", {}, "layer_idx"),
    {"mamba": (("in_proj",), "out_proj"), "self_attn": (("qkv_proj",), "o_proj")},
    [norm(each, **_EPSILON) for each in ("input_layernorm", "post_attention_layernorm")],
    ["shared_mlp.input_linear"],
    ["shared_mlp.output_linear"],
    ["block_sparse_moe"],
    layer_index=["layer_idx", "self_attn.attn.layer_id"],
    tp_size=[f"{last}.input_size / {last}.input_size_per_partition" for last in _LASTS],
    tp_rank=[f"{last}.tp_group.rank_in_group" for last in _LASTS],
    **NOT_AS_GIVEN,
)

_FILE = f"{FILES}.granitemoehybrid"
SGLANG_HYBRIDS = Adapter(
    "sglang_hybrids",
    layers={
        "sglang.srt.layers.attention.mamba.mamba:MambaMixer2": _MAMBA2,
        f"{_FILE}:GraniteMoeHybridAttention": attention(),
        f"{_FILE}:GraniteMoeHybridAttentionDecoderLayer": _GRANITE,
        f"{_FILE}:GraniteMoeHybridMambaDecoderLayer": _GRANITE,
        f"{_FILE}:GraniteMoeHybridModel": streams.final_norm(_GRANITE),
    },
)
