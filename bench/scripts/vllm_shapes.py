"""Models at their published widths and with few layers, as folders that vLLM loads without a network, and their random weights.

Published are the configs in `tests/engines/checkpoints`, and in `checkpoints` here what no test needs (huggingface.co/Qwen/Qwen3-32B-FP8,
Qwen/Qwen3-4B, meta-llama/Llama-3.3-70B-Instruct; MiniMax-M3's are the defaults of vLLM 0.33's class for it, which mirror its checkpoint). What is
smaller here is said in `SHAPES`: layers, and the vocabulary, which no decode graph holds.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

CHECKPOINTS = (Path(__file__).parents[2] / "tests" / "engines" / "checkpoints", Path(__file__).parent / "checkpoints")
VOCABULARY = 16384
FIRST_SEED = 0
"""Of the weights; another one gives another model of the same shape."""
_FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "block_structure": None, "group_size": None}
CHANNELS = {  # compressed-tensors' w8a8: a scale per column of the weight, and per token
    "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
    "config_groups": {"group_0": {
        "targets": ["Linear"], "weights": {**_FP8, "strategy": "channel", "dynamic": False},
        "input_activations": {**_FP8, "strategy": "token", "dynamic": True},
    }},
}  # fmt: skip
INT4_EXPERTS = {  # compressed-tensors' w4a16 of Kimi-K2.5: experts alone, in groups of 32
    "quant_method": "compressed-tensors", "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
    "config_groups": {"group_0": {
        "targets": ["Linear"], "input_activations": None,
        "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False},
    }},
}  # fmt: skip
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}


def sparse_layers(which: list[int]) -> dict[str, Any]:
    """MiniMax-M3's keys for layers whose attention is sparse (1) or not (0), with one of its four index heads."""
    return {
        "sparse_attention_config": {
            "use_sparse_attention": True, "sparse_index_dim": 128, "sparse_num_index_heads": 1, "sparse_topk_blocks": 16,
            "sparse_block_size": 128, "sparse_disable_index_value": which, "sparse_score_type": "max", "sparse_init_block": 0,
            "sparse_local_block": 1, "sparse_attention_freq": which,
        }
    }  # fmt: skip


_EIGHTH = {
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "intermediate_size": 2304,
    "moe_intermediate_size": 256,
}
_DENSE = {"num_hidden_layers": 4, "first_k_dense_replace": 4, "n_routed_experts": 32, "n_group": 4, "topk_group": 2}
_ALL_DENSE = {**_DENSE, "num_hidden_layers": 6, "first_k_dense_replace": 6, "quantization_config": BLOCKS}
_ALL_MIXED = {"num_hidden_layers": 3, "first_k_dense_replace": 0, "quantization_config": BLOCKS}
_GLM_EIGHTH = {
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 1536,
    "moe_intermediate_size": 256,
}
_M3_EIGHTH = {
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "intermediate_size": 384,
    "dense_intermediate_size": 1536,
    "shared_intermediate_size": 384,
}
_M3_DENSE = {**_M3_EIGHTH, "num_hidden_layers": 6, "moe_layer_freq": [0] * 6, **sparse_layers([0] * 6)}
_M3_MIXED = {**_M3_EIGHTH, "num_hidden_layers": 4, "moe_layer_freq": [1] * 4, **sparse_layers([1] * 4)}
_GPT_OSS = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    # No layer is a mixture: the experts that the config must name are never built.
    "deepseek-v3": ("deepseek-v3", _DENSE),
    "deepseek-v3-fp8": ("deepseek-v3", {**_DENSE, "quantization_config": BLOCKS}),
    # What a rank of eight holds of the attention, and all of it on one rank; the hidden size of DeepSeek-V2-Lite for the former.
    "mla-16": (
        "deepseek-v3",
        {**_DENSE, "num_hidden_layers": 6, "first_k_dense_replace": 6, "hidden_size": 2048, "num_attention_heads": 16,
         "num_key_value_heads": 16, "intermediate_size": 5632},
    ),
    "mla-128": ("deepseek-v3", {**_DENSE, "num_hidden_layers": 2, "first_k_dense_replace": 2}),
    # What a rank of eight holds, its experts by columns as vLLM splits them.
    "deepseek-v3-rank8-dense": ("deepseek-v3", {**_ALL_DENSE, **_EIGHTH}),
    "deepseek-v3-rank8-mixture": ("deepseek-v3", {**_ALL_MIXED, **_EIGHTH}),
    # Two such ranks.
    "deepseek-v3-rank8-dense-tp2": (
        "deepseek-v3",
        {**_ALL_DENSE, **_EIGHTH, "num_attention_heads": 32, "num_key_value_heads": 32, "intermediate_size": 4608},
    ),
    # As many layers as one GPU serves twice, the published three dense ones among them.
    "deepseek-v3-rank8-12-layers": (
        "deepseek-v3",
        {**_EIGHTH, "num_hidden_layers": 12, "first_k_dense_replace": 3, "quantization_config": BLOCKS},
    ),
    "gpt-oss-20b": ("gpt-oss-20b", {"quantization_config": _GPT_OSS["quantization_config"]}),
    "deepseek-v3.2-rank8-dense": ("deepseek-v3.2", {**_ALL_DENSE, **_EIGHTH}),
    "deepseek-v3.2-rank8-dense-tp2": (
        "deepseek-v3.2",
        {**_ALL_DENSE, **_EIGHTH, "num_attention_heads": 32, "num_key_value_heads": 32, "intermediate_size": 4608},
    ),
    "deepseek-v3.2-rank8-mixture": ("deepseek-v3.2", {**_ALL_MIXED, **_EIGHTH}),
    # The indexer is whole on each rank.
    "glm-5-rank8-dense": ("glm-5", {**_ALL_DENSE, **_GLM_EIGHTH}),
    "glm-5-rank8-mixture": ("glm-5", {**_ALL_MIXED, **_GLM_EIGHTH}),
    # Three delta nets and one attention, as published; but for the first layer, published MLPs are mixtures in MXFP4.
    "kimi-k3-rank8-dense": (
        "kimi-k3",
        {"num_hidden_layers": 4, "first_k_dense_replace": 4, "num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": 74, "intermediate_size": 4224,
         "linear_attn_config": {"full_attn_layers": [4], "kda_layers": [1, 2, 3], "head_dim": 128, "num_heads": 12, "short_conv_kernel_size": 4,
                                "gate_lower_bound": -5.0, "use_full_rank_gate": True}},
    ),
    # Each of eight ranks has one of the four heads for keys, two ranks the same. In blocks as vLLM quantises it online (fp8_per_block).
    "minimax-m3-rank8-dense": ("minimax-m3", _M3_DENSE),
    "minimax-m3-rank8-dense-fp8": ("minimax-m3", {**_M3_DENSE, "quantization_config": BLOCKS}),
    "minimax-m3-rank8-mixture": ("minimax-m3", _M3_MIXED),
    "minimax-m3-rank8-mixture-fp8": ("minimax-m3", {**_M3_MIXED, "quantization_config": BLOCKS}),
    # Attention, dense layers and shared experts whole on each rank, and whole experts, 32 of 256. Each of eight such ranks sends
    # eight tokens' worth to experts and takes as much: 8 of 32 per token of its own.
    "deepseek-v3-dp-dense": ("deepseek-v3", {**_ALL_DENSE, "num_hidden_layers": 4, "first_k_dense_replace": 4}),
    "deepseek-v3-dp-mixture": ("deepseek-v3", {**_ALL_MIXED, "n_routed_experts": 32}),
    "kimi-k2.5-rank8-mixture": (
        "kimi-k2.5",
        {"num_hidden_layers": 3, "first_k_dense_replace": 0, "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 2304,
         "moe_intermediate_size": 256, "quantization_config": INT4_EXPERTS},
    ),
    "qwen3-32b-fp8": ("qwen3-32b", {"num_hidden_layers": 4, "quantization_config": BLOCKS}),
    "qwen3-32b-fp8-rank4": (
        "qwen3-32b",
        {"num_hidden_layers": 6, "num_attention_heads": 16, "num_key_value_heads": 2, "intermediate_size": 6400,
         "quantization_config": BLOCKS},
    ),
    "llama-70b-w8a8-rank4": (
        "llama-3.3-70b",
        {"num_hidden_layers": 6, "num_attention_heads": 16, "num_key_value_heads": 2, "intermediate_size": 7168,
         "quantization_config": CHANNELS},
    ),
    "qwen3-4b": ("qwen3-4b", {"num_hidden_layers": 6}),
    # Three delta nets and one attention, all experts. What blocks do not divide is in bfloat16.
    "qwen3-next-fp8": (
        "qwen3-next-80b-a3b",
        {"num_hidden_layers": 4,
         "quantization_config": {**BLOCKS, "modules_to_not_convert": [f"model.layers.{i}.linear_attn.in_proj_ba" for i in range(4)]}},
    ),
    # Small enough to be served whole, twice on one GPU (huggingface.co/Qwen/Qwen3-0.6B-FP8; Qwen3-4B's config but for its sizes).
    "qwen3-0.6b-fp8": (
        "qwen3-4b",
        {"num_hidden_layers": 28, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 3072,
         "quantization_config": BLOCKS},
    ),
    "qwen3-next": ("qwen3-next-80b-a3b", {"num_hidden_layers": 4}),
    "gpt-oss-120b": ("gpt-oss-120b", _GPT_OSS),
    # Small enough to try the benchmark itself, and to do so on a CPU.
    "tiny-qwen3": (
        "qwen3-4b",
        {"num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 512},
    ),
    "tiny": (
        "deepseek-v3",
        {**_DENSE, "num_hidden_layers": 2, "first_k_dense_replace": 2, "hidden_size": 1024, "num_attention_heads": 16,
         "num_key_value_heads": 16, "intermediate_size": 2048},
    ),
}  # fmt: skip
"""Shape -> the published config, and what differs from it."""


def layers_of(shape: str) -> int:
    """How many decoder layers a shape has."""
    return int(SHAPES[shape][1]["num_hidden_layers"])


def folder_of(shape: str, below: Path) -> Path:
    """A folder with the config of a shape and a tokenizer of one word per token."""
    base, changes = SHAPES[shape]
    config = next(
        json.loads(path.read_text()) for path in (each / base / "config.json" for each in CHECKPOINTS) if path.exists()
    )
    outer = config
    config = config.get("text_config", config)
    # vLLM knows some by the name of the whole alone, and not by what is said of the text.
    whole = "text_config" in outer and "architectures" not in config
    config = config | {"vocab_size": VOCABULARY, "max_position_embeddings": 4096, "bos_token_id": 0, "eos_token_id": 1}
    config = {key: value for key, value in {**config, **changes}.items() if value is not None}
    config.setdefault("torch_dtype", "bfloat16")
    if isinstance(config.get("rope_scaling"), dict):
        config["max_position_embeddings"] = int(
            config["rope_scaling"]["original_max_position_embeddings"] * config["rope_scaling"]["factor"]
        )
    if whole:
        quantised = config.pop("quantization_config", None)
        config = {**outer, "text_config": config, **({"quantization_config": quantised} if quantised else {})}
    path = below / shape
    path.mkdir(parents=True, exist_ok=True)
    _write(path / "config.json", json.dumps(config, indent=1))
    words = {f"t{i}": i for i in range(VOCABULARY)}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "t2"},
    }  # fmt: skip
    _write(path / "tokenizer.json", json.dumps(tokenizer))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "t0", "eos_token": "t1", "unk_token": "t2"}
    _write(path / "tokenizer_config.json", json.dumps(about))
    return path


def _write(path: Path, text: str) -> None:
    """All of it at once: an engine of another command may be reading there."""
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    beside.write_text(text)
    beside.replace(path)


def sharded_in(model: Any) -> frozenset[str]:
    """The parameters of an engine's model that each rank has a part of."""
    return frozenset(
        f"{path}.{name}"
        for path, each in model.named_modules()
        if getattr(each, "tp_size", 1) > 1 or ".experts" in path
        for name, _ in each.named_parameters(recurse=False)
    )


def fill(state: dict[str, Any], sharded: frozenset[str] = frozenset(), rank: int = 0, ranks: int = 1) -> None:
    """Draw weights that make a model's numbers worth comparing: rows of unit gain, small residual branches, logits apart.

    vLLM's dummy weights make all logits alike. Each tensor has a seed of its own, the same at every start, and of what is sharded
    each rank has another part: equal ones would make every token tie with those of the other ranks.

    Args:
        state: of the model on this rank.
        sharded: names of what each rank has a part of.
        rank: this one.
        ranks: that share them.
    """
    import torch

    for place, (name, tensor) in enumerate(sorted(state.items()), 1):
        seed = FIRST_SEED + place + (100_000 * rank if name in sharded else 0)
        parts = ranks if name in sharded or name.removesuffix("_scale_inv").removesuffix("_scale") in sharded else 1
        if tensor.device.type == "meta" or tensor.numel() == 1:
            continue
        generator = torch.Generator(device=tensor.device).manual_seed(seed)
        inner = any(word in name for word in ("o_proj", "down_proj", "out_proj", "w2_"))
        if tensor.dtype == torch.uint8:  # MXFP4: codes, and exponents plus 127
            if "scale" in name:
                tensor.fill_(118 if inner else 120)
            else:
                tensor.random_(0, 256, generator=generator)
        elif name.endswith("_packed"):  # eight values of four bits along its columns
            tensor.random_(-(2**31), 2**31, generator=generator)
        elif not tensor.is_floating_point():
            continue
        elif tensor.dim() == 1 and "norm" in name:
            tensor.uniform_(0.5, 1.5, generator=generator)
        elif tensor.dim() == 1 or name.endswith("bias"):
            tensor.uniform_(-0.1, 0.1, generator=generator)
        elif (packed := name.replace("_scale", "_packed")) != name and packed in state:
            tensor.fill_(_gain(name, state[packed].shape[-1] * 8, inner, parts) / 8)
        elif "scale" in name:
            columns = state[name.removesuffix("_scale_inv").removesuffix("_scale")].shape[-1]
            tensor.fill_(_gain(name, columns, inner, parts) / 224)
        elif tensor.element_size() == 1:
            drawn = torch.empty(tensor.shape, dtype=torch.bfloat16, device=tensor.device)
            tensor.copy_(drawn.uniform_(-224, 224, generator=generator))
        else:
            gain = _gain(name, tensor.shape[-1], inner, parts)
            tensor.uniform_(-gain, gain, generator=generator)


def _gain(name: str, columns: int, inner: bool, parts: int) -> float:
    if "embed" in name:
        return 1.7
    # What ends a residual branch is split along its columns.
    whole = columns * parts if inner else columns
    return float((3.0 / whole) ** 0.5 * (0.3 if inner else 3.0 if "lm_head" in name else 1.0))
