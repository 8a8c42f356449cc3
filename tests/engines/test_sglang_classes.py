"""Every text architecture of SGLang that can be built without a GPU: read in full, or said why not in docs/sglang-classes.md.

Real classes on the meta device, from the default config of transformers' class of that name, or from a small one made here. Run by
`make test-engines`; `UPDATE_DOCS=1` writes the page.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import re
from collections.abc import Mapping
from typing import Any

import pytest

sglang_layers = pytest.importorskip("sglang_layers")
import census  # noqa: E402
from sglang.srt.configs.model_config import is_multimodal_model  # noqa: E402
from sglang.srt.models.registry import ModelRegistry  # noqa: E402
from sglang_host import published_config  # noqa: E402
from sglang_layers import build_of  # noqa: E402

from layerfuse import registry  # noqa: E402
from layerfuse.adapters import GatedMLPSpec, GQASpec, MLASpec, ResidualSpec, SpecError  # noqa: E402
from layerfuse.engines.sglang.facts import ADDS_ITSELF, OTHER_NORMS, WITHOUT_CODE  # noqa: E402
from layerfuse.engines.sglang.seams import SEAMS  # noqa: E402

PAGE = census.ROOT / "docs" / "sglang-classes.md"
RELEASE = importlib.metadata.version("sglang")

_TEXT = re.compile(r"(ForCausalLM|LMHeadModel|ModelLM|ChatGLMModel)$")
_NO_TEXT = re.compile(r"^(Transformers|Llava|YiVL|MultiModality|DFlash|Eagle3)|Assistant")
"""Beside those that SGLang calls multimodal: some it does not, drafts, and what runs transformers' own classes."""
NAMES = [
    name
    for name in sorted(ModelRegistry.models)
    if _TEXT.search(name) and not _NO_TEXT.search(name) and not is_multimodal_model([name])
]

_V3 = {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
_INTERVAL = {"full_attention_interval": 4}
MORE: Mapping[str, Mapping[str, Any]] = {
    "GraniteMoeHybridForCausalLM": {"layer_types": ["mamba", "attention", "mamba", "mamba"]},
    "DeepseekV3ForCausalLM": _V3,
    "DeepseekV32ForCausalLM": _V3,
    "Exaone4ForCausalLM": {"sliding_window_pattern": "LLLG"},
    "ExaoneMoeForCausalLM": {"is_moe_layer": [False, True, True, True], "sliding_window_pattern": "LLLG"},
    "Gemma2ForCausalLM": {"hidden_act": "gelu_pytorch_tanh"},
    "Glm4MoeForCausalLM": {"head_dim": 128},
    "Glm4MoeLiteForCausalLM": {"first_k_dense_replace": 1, "moe_layer_freq": 1},
    "GlmMoeDsaForCausalLM": {**_V3, "first_k_dense_replace": 1},
    "HYV3ForCausalLM": {"first_k_dense_replace": 1, "expert_hidden_dim": 512, "route_norm": True},
    "MiMoV2FlashForCausalLM": {
        "hybrid_layer_pattern": [0, 1, 1, 0], "moe_layer_freq": [0, 1, 1, 1], "layernorm_epsilon": 1e-5, "sliding_window_size": 128,
        "sliding_window": 128, "n_group": 1, "topk_group": 1, "swa_num_attention_heads": 8, "swa_num_key_value_heads": 4,
        "swa_head_dim": 64, "swa_v_head_dim": 64, "attention_bias": False, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "MiniMaxM2ForCausalLM": {"rotary_dim": 64, "scoring_func": "sigmoid"},
    "Qwen3NextForCausalLM": _INTERVAL,
    "Qwen3_5ForCausalLM": _INTERVAL,
    "Qwen3_5MoeForCausalLM": _INTERVAL,
}  # fmt: skip
"""What SGLang asks a config for, and the default one of transformers does not say."""

PATCHES: Mapping[str, Mapping[str, Any]] = {
    "LongcatFlashForCausalLM": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7}},
}
"""What its config object must say, and a config.json cannot."""

OTHERS: census.Others = {
    **census.OTHERS,
    "BailingMoEForCausalLM": ("LlamaForCausalLM", census.BAILING),
    "ChatGLMModel": (
        "LlamaForCausalLM",
        {"num_layers": 4, "kv_channels": 64, "multi_query_attention": True, "multi_query_group_num": 4, "ffn_hidden_size": 1024,
         "layernorm_epsilon": 1e-5, "rmsnorm": True, "padded_vocab_size": 1024, "seq_length": 512, "add_bias_linear": False,
         "add_qkv_bias": True, "post_layer_norm": True, "apply_residual_connection_post_layernorm": False, "hidden_dropout": 0.0,
         "fp32_residual_connection": False},
    ),
    "DeepseekForCausalLM": (
        "LlamaForCausalLM",
        {"n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "moe_layer_freq": 1,
         "first_k_dense_replace": 1, "norm_topk_prob": False},
    ),
    "Ernie4_5_ForCausalLM": ("Ernie4_5ForCausalLM", {}),
    "Grok1ForCausalLM": (
        "LlamaForCausalLM",
        {"num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256},
    ),
    "LLaDA2MoeModelLM": ("LlamaForCausalLM", census.BAILING_V2),
    "QWenLMHeadModel": (
        "LlamaForCausalLM",
        {"layer_norm_epsilon": 1e-5, "rope_theta": 1e4, "kv_channels": 64, "seq_length": 512, "num_key_value_heads": 8},
    ),
    "QuantMixtralForCausalLM": ("MixtralForCausalLM", {}),
    "SDARForCausalLM": ("Qwen3ForCausalLM", census.SMALL),
    "SDARMoeForCausalLM": ("Qwen3MoeForCausalLM", {}),
    "SarvamMLAForCausalLM": ("DeepseekV3ForCausalLM", {}),
    "SarvamMoEForCausalLM": ("LlamaForCausalLM", census.BAILING_V2),
    "TorchNativeLlamaForCausalLM": ("LlamaForCausalLM", {}),
    "TorchNativePhi3ForCausalLM": ("Phi3ForCausalLM", {}),
    "XverseForCausalLM": ("LlamaForCausalLM", {}),
    "XverseMoeForCausalLM": ("LlamaForCausalLM", {**census.MIXTURE, "moe_top_k": 2}),
}  # fmt: skip
"""Those that transformers has no class for, or another one."""

PUBLISHED = {"DeepseekV2ForCausalLM": "deepseek-v2-lite", "KimiK3LinearForCausalLM": "kimi-k3"}
"""Those whose published config is at hand, and whose default one SGLang does not take."""

SWITCHED = "SGLang takes no attention backend of a CPU's for layers that are no attention"
REASONS: Mapping[str, str] = {
    "Gemma4ForCausalLM": census.causal.REASONS["Gemma4ForCausalLM"],
    "FalconH1ForCausalLM": "its decoder layers and MLPs are not declared",
    **dict.fromkeys(["Lfm2ForCausalLM", "Lfm2MoeForCausalLM"], SWITCHED),
    "Gemma3nForCausalLM": "several streams, and layers that keep no keys of their own, which no spec describes",
    "HYV4ForCausalLM": "several streams, which no spec describes",
    "HrmTextForCausalLM": "two stacks of layers that run in turns over one stream, with norms without weights, which no spec describes",
    "Llama4ForCausalLM": "attention in chunks, which no spec describes",
    "QuantMixtralForCausalLM": "experts that are whole modules, shared out to the ranks, which no spec describes",
    "TorchNativeLlamaForCausalLM": "torch's own linears, which it cuts after they were built: its classes are not declared",
    "TorchNativePhi3ForCausalLM": "torch's own linears, which it cuts after they were built: its classes are not declared",
    "ZayaForCausalLM": "layers of attention and of experts in turns, with a stream that is scaled, which no spec describes",
}
"""Of those that are not read in full."""


def build(name: str, tp: int = 1, rank: int = 0, **arguments: Any) -> tuple[Any, Any]:
    if name in PUBLISHED:
        config = published_config(PUBLISHED[name])
        config = {**config.get("text_config", config), "architectures": [name]}
    else:
        config = census.config_of(name, OTHERS, MORE)
    return build_of(config, tp=tp, rank=rank, patch=PATCHES.get(name, {}), **arguments)


def test_every_architecture_is_read_or_named_with_the_reason() -> None:
    found = list(census.answers(NAMES, {*OTHERS, *PUBLISHED}, build, REASONS))
    census.check_page(PAGE, "SGLang", RELEASE, found)


def test_on_the_second_of_two_ranks_each_holds_its_half() -> None:
    names = census.read_on(PAGE)
    assert len(names) >= 70
    for name in names:
        model, config = build(name, tp=2, rank=1)
        if name == "GPT2LMHeadModel":  # its kernel layer holds the keys of all heads, and its linear those of this rank
            with pytest.raises(SpecError, match="num_local_kv_heads: expected 6"):
                registry.specs_in(model)
            continue
        census.check_second_of_two(name, registry.specs_in(model), config)


def test_every_class_that_is_declared_is_one_of_sglangs() -> None:
    """A misspelt declaration would never be noticed otherwise."""
    declared = [
        key for key, owner in registry.layer_classes().items() if owner in ("sglang_decoders", "sglang_hybrids")
    ]
    assert len(declared) > 150
    for key in declared:
        module, _, name = key.partition(":")
        assert isinstance(getattr(importlib.import_module(module), name), type), key


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        ("DeepseekV3ForCausalLM", (2, 0)),
        ("Glm4MoeForCausalLM", (2, 0)),
        ("Qwen3MoeForCausalLM", (2, 0)),
        # SGLang cuts its heads by the model's ranks all the same.
        ("Qwen2ForCausalLM", (4, 2)),
    ],
)
def test_heads_are_shared_out_to_the_ranks_of_data_parallel_attention(name: str, attention: tuple[int, int]) -> None:
    """Of four ranks, two share one attention: the third is the first of the second pair. All four share an MLP."""
    model, config = build(name, tp=4, rank=2, dp_size=2, enable_dp_attention=True)

    specs = [spec for _, spec in registry.specs_in(model)]
    attentions = [spec for spec in specs if isinstance(spec, (GQASpec, MLASpec))]
    streams = [spec for spec in specs if isinstance(spec, ResidualSpec)]
    mlps = [spec for spec in specs if isinstance(spec, GatedMLPSpec)]

    assert {_shares(spec) for spec in (*attentions, *streams)} == {attention}
    assert {spec.num_local_heads for spec in attentions} == {config.num_attention_heads // attention[0]}
    assert {_shares(spec) for spec in mlps} <= {(4, 2)}
    assert mlps or streams[0].experts is not None


def test_dense_mlps_that_every_rank_holds_whole_are_not_cut() -> None:
    model, _ = build("DeepseekV3ForCausalLM", tp=4, rank=2, dp_size=2, enable_dp_attention=True, moe_dense_tp_size=1)

    mlps = {path: _shares(spec) for path, spec in registry.specs_in(model, of=GatedMLPSpec)}

    assert mlps["model.layers.0.mlp"] == (1, 0)
    assert mlps["model.layers.3.mlp.shared_experts"] == (4, 2)


def _shares(spec: Any) -> tuple[int, int]:
    return spec.parallel.size, spec.parallel.rank


def test_plans_know_the_declared_models_in_which_nothing_can_stand() -> None:
    declared = {name for entry in registry.models().values() for name in entry.architectures}
    assert {name for name in declared if name not in ModelRegistry.models} == WITHOUT_CODE
    for name in ADDS_ITSELF:
        code = inspect.getsource(importlib.import_module(ModelRegistry.models[name].__module__))
        apart = "norm(hidden_states)" in code or "read=UNFUSED_NORM_READOUT" in code
        assert apart and "norm(hidden_states, residual" not in code
    for norm in OTHER_NORMS.values():
        code = inspect.getsource(importlib.import_module("sglang.srt.models.gemma3_causal"))
        assert f"= {norm}(" in code
    assert not set(OTHER_NORMS.values()) & {seam.key[1] for seam in SEAMS}
