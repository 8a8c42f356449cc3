"""One rank's part of a decoder layer of gpt-oss-120b, from transformers' classes, as an engine runs it at decode.

The experts are one opaque op with 4-bit weights (`mxfp4_experts`), q, k and v one product, and the biases behind a sum over the
ranks are rank 0's. The cache is empty, so attention to one key and the sink is a sigmoid, which compilers fuse with the rope.
"""

from __future__ import annotations

from typing import Any

import torch
from block_gemm import Part
from decode_layer import Step, of_this_rank, scaled
from mxfp4_experts import Experts
from mxfp4_plain import BLOCK
from torch import Tensor, nn

from layerfuse import registry
from layerfuse.adapters.specs import Parallel
from layerfuse.fusion import FusionConfig
from layerfuse.testing import config_of

EXPERTS, TOP_K, INTERMEDIATE = 128, 4, 2880
"""Of openai/gpt-oss-120b's configuration. The declared model says nothing of experts."""


def gpt_oss(device: str, tiny: bool, parallel: Parallel) -> tuple[Step, Any, FusionConfig]:
    """The layer in bfloat16, its experts in MXFP4."""
    from transformers import AttentionInterface
    from transformers.models.gpt_oss import modeling_gpt_oss as source

    AttentionInterface.register("one_key", _attention)
    config = config_of(registry.model("gpt-oss-120b"))
    config._attn_implementation = "one_key"
    config.num_local_experts, config.num_experts_per_tok, config.intermediate_size = EXPERTS, TOP_K, INTERMEDIATE
    if tiny:
        config.hidden_size, config.intermediate_size, config.num_local_experts = 256, 256, 8
        config.num_attention_heads, config.num_key_value_heads = 8, 4
    config.num_attention_heads //= parallel.size
    config.num_key_value_heads //= parallel.size
    # A quarter of 2880 is no whole number of blocks of one scale: engines pad it.
    intermediate = -(-config.intermediate_size // (parallel.size * BLOCK)) * BLOCK
    config.intermediate_size = 1
    with torch.device(device):
        layer = scaled(source.GptOssDecoderLayer(config, layer_idx=1).to(torch.bfloat16))
        rotary = source.GptOssRotaryEmbedding(config)
    attention, experts = layer.self_attn, layer.mlp.experts
    nn.init.normal_(attention.sinks)
    of_this_rank(parallel, attention.o_proj)
    if parallel.rank:
        attention.o_proj.bias = None
    _merge(attention, "q_proj", "k_proj", "v_proj")
    layer.mlp.experts = Experts(
        config.num_local_experts, config.hidden_size, intermediate, experts.alpha, experts.limit,
        biased=not parallel.rank, device=device, seed=1 + (parallel.rank or 0),
    )  # fmt: skip
    step = Step(layer, lambda hidden, cos, sin: attention(hidden, (cos, sin), None)[0])
    return step, rotary, FusionConfig(level=2)


def _attention(
    _module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: Any, *, scaling: float, s_aux: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """(batch, heads, 1, head_dim) and one key for several heads: a softmax over one score and the head's sink."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(repeats, 1) for each in (key, value))
    score = (query.float() * key.float()).sum(-1, keepdim=True) * scaling
    weight = torch.sigmoid(score - s_aux.float().view(1, -1, 1, 1))
    return (weight * value.float()).to(value.dtype).transpose(1, 2), None


def _merge(module: nn.Module, *names: str) -> None:
    """Linears that read one hidden state as one."""
    linears = [getattr(module, name) for name in names]
    weight = torch.cat([linear.weight for linear in linears])
    whole = nn.Linear(weight.shape[1], weight.shape[0], device="meta", dtype=weight.dtype)
    whole.weight = nn.Parameter(weight, requires_grad=False)
    whole.bias = nn.Parameter(torch.cat([linear.bias for linear in linears]), requires_grad=False)
    left: list[Tensor] = []
    start = 0
    for name, linear in zip(names, linears, strict=True):
        stop = start + linear.out_features
        setattr(module, name, Part(whole, left, start, stop, len(names) - 1))
        start = stop
