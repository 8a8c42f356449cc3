"""Every text architecture of vLLM that can be built without a GPU: read in full, or said why not in docs/vllm-classes.md.

Real classes on the meta device, from the default config of transformers' class of that name, or from a small one made here. Run by
`make test-engines`; `UPDATE_DOCS=1` writes the page.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
from vllm_host import config_on_cpu, import_model, published_config, vllm_parallel, without_gpu  # isort: skip  (before vllm)
import transformers
from vllm.config import CompilationMode, set_current_vllm_config
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS
from vllm.utils.torch_utils import set_default_torch_dtype

from layerfuse import registry
from layerfuse.adapters import (
    FinalNormSpec,
    GQASpec,
    Mamba2Spec,
    MLASpec,
    MLPSpec,
    OtherMixerSpec,
    ResidualSpec,
    UnknownLayerError,
)

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "contract"))
import test_causal_classes as causal  # noqa: E402

PAGE = ROOT / "docs" / "vllm-classes.md"
RELEASE = importlib.metadata.version("vllm")
MIXTURE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "num_shared_experts": 1}
SMALL = {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
    "vocab_size": 1024,
}  # fmt: skip

MORE: Mapping[str, Mapping[str, Any]] = {
    "AfmoeForCausalLM": {
        "score_func": "sigmoid", "route_norm": True, "route_scale": 1.0, "num_dense_layers": 1, "n_group": 1, "topk_group": 1,
    },
    "ApertusForCausalLM": SMALL,
    "Glm4MoeForCausalLM": {"head_dim": 128},
    "Glm4MoeLiteForCausalLM": {"first_k_dense_replace": 1},
    "HYV3ForCausalLM": {"first_k_dense_replace": 1, "expert_hidden_dim": 512, "route_norm": True},
    "LongcatFlashForCausalLM": {"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "zero_expert_type": "identity"},
    "MiMoV2FlashForCausalLM": {
        "hybrid_layer_pattern": [0, 1, 1, 0], "moe_layer_freq": [0, 1, 1, 1], "layernorm_epsilon": 1e-5, "sliding_window_size": 128,
        "sliding_window": 128, "n_group": 1, "topk_group": 1, "swa_num_attention_heads": 8, "swa_num_key_value_heads": 4,
        "swa_head_dim": 64, "attention_bias": False,
    },
    "Lfm2ForCausalLM": {
        "block_dim": 2560, "conv_dim": 2560, "layer_types": ["conv", "full_attention", "conv", "conv"],
    },
    # Experts without a gate vLLM builds on GPUs only.
    "NemotronHForCausalLM": {"layers_block_type": ["mamba", "mlp", "attention", "mamba"], "hybrid_override_pattern": "M-*M"},
    "MiniMaxM2ForCausalLM": {"rotary_dim": 64, "scoring_func": "sigmoid"},
}  # fmt: skip
"""What vLLM asks a config for, and the default one of transformers does not say."""

BAILING = {
    **MIXTURE, "use_bias": False, "use_qkv_bias": False, "first_k_dense_replace": 1, "norm_topk_prob": True, "embedding_dropout": 0.0,
    "head_dim": 64, "rope_theta": 1e4,
}  # fmt: skip
OTHERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "BailingMoeForCausalLM": ("LlamaForCausalLM", BAILING),
    "BailingMoeV2ForCausalLM": (
        "LlamaForCausalLM",
        {**BAILING, "use_qk_norm": True, "use_rmsnorm": True, "score_function": "sigmoid", "n_group": 1, "topk_group": 1,
         "moe_router_enable_expert_bias": True, "routed_scaling_factor": 1.0},
    ),
    "DeepseekForCausalLM": (
        "DeepseekV2ForCausalLM",
        {"q_lora_rank": None, "kv_lora_rank": 0, "qk_nope_head_dim": 0, "qk_rope_head_dim": 0, "v_head_dim": 0},
    ),
    "ExaoneForCausalLM": ("LlamaForCausalLM", {"num_layers": 4, "layer_norm_epsilon": 1e-5, "activation_function": "silu"}),
    "ExaoneMoEForCausalLM": ("ExaoneMoeForCausalLM", {}),
    "IQuestCoderForCausalLM": ("LlamaForCausalLM", {}),
    "InternLM2ForCausalLM": ("LlamaForCausalLM", {"bias": False}),
    "InternLM3ForCausalLM": ("LlamaForCausalLM", {}),
    "LLaMAForCausalLM": ("LlamaForCausalLM", {}),
    "MiMoForCausalLM": ("Qwen2ForCausalLM", SMALL),
    "MiMoV2ForCausalLM": ("MiMoV2FlashForCausalLM", {}),
    "MiniCPMForCausalLM": (
        "LlamaForCausalLM",
        {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256, "num_experts": 0},
    ),
    "MistralLarge3ForCausalLM": ("DeepseekV3ForCausalLM", {}),
    "OrionForCausalLM": ("LlamaForCausalLM", {}),
    "PanguEmbeddedForCausalLM": ("LlamaForCausalLM", {"bias": True}),
    "PhiMoEForCausalLM": ("PhimoeForCausalLM", SMALL),
    "SolarForCausalLM": (
        "LlamaForCausalLM",
        {"bskcn_1": [1], "bskcn_2": [2], "bskcn_3": [2], "bskcn_4": [3], "bskcn_tv": [0.9, 0.8]},
    ),
    "TeleChat2ForCausalLM": (
        "LlamaForCausalLM",
        {"n_layer": 4, "n_head": 8, "ffn_hidden_size": 1024, "layer_norm_epsilon": 1e-5},
    ),
    "TeleChat3ForCausalLM": ("LlamaForCausalLM", {}),
    "TeleFLMForCausalLM": ("LlamaForCausalLM", {"use_mup": False, "mup_scale_factor": 1.0, "input_mult": 1.0, "output_mult": 1.0}),
}  # fmt: skip
"""Those that transformers has no class for -> the class whose config they are like, and what they ask for besides."""

PUBLISHED = {"KimiLinearForCausalLM": "kimi-linear-48b-a3b"}
"""Those whose published config is at hand, and whose default one vLLM does not take."""


def config_of(name: str) -> dict[str, Any]:
    """A config.json."""
    if name in PUBLISHED:
        return published_config(PUBLISHED[name])
    like, more = OTHERS.get(name, (name, {}))
    cls = getattr(transformers, like).config_class
    given = SMALL if like == "LlamaForCausalLM" and name != like else {}
    config = cls(**causal.WANTED.get(cls.model_type, {}), **given)
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        causal.cut(part)
    said = json.loads(config.to_json_string(use_diff=False))
    return {**said, **MORE.get(like, {}), **more, "architectures": [name]}


@contextlib.contextmanager
def built(name: str, folder: Path, tp: int = 1, rank: int = 0) -> Iterator[tuple[Any, Any]]:
    """The model, and its text config."""
    path = folder / name
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config_of(name)))
    file, cls = _TEXT_GENERATION_MODELS[name]
    with contextlib.ExitStack() as stack:
        stack.enter_context(without_gpu())
        model_class = import_model(f"{'' if file.startswith('vllm') else 'vllm.model_executor.models.'}{file}:{cls}")
        ModelRegistry.register_model(name, model_class)
        config = config_on_cpu(
            str(path),
            tp=tp,
            rank=rank,
            model={"dtype": "bfloat16", "max_model_len": 512, "language_model_only": True},
            compilation={"mode": CompilationMode.NONE},
        )
        stack.enter_context(set_current_vllm_config(config))
        stack.enter_context(vllm_parallel(tp, rank))
        stack.enter_context(set_default_torch_dtype(torch.bfloat16))
        # xIELU computes with its parameters as it is made.
        stack.enter_context(torch.device("cpu" if name == "ApertusForCausalLM" else "meta"))
        model = initialize_model(config, model_class=model_class)
        yield model, config.model_config.hf_text_config


def answers(folder: Path) -> Iterator[causal.Answer]:
    """Each architecture once, by name."""
    for name in sorted(_TEXT_GENERATION_MODELS):
        if not hasattr(transformers, name) and name not in OTHERS:
            yield causal.Answer(name, "not built", "transformers has no config for it, and none was made here")
            continue
        try:
            with built(name, folder) as (model, config):
                yield answer(name, model, config)
        except Exception as error:
            if isinstance(error, AssertionError) and "spec" in str(error):
                raise
            yield causal.Answer(name, "not built", f"{type(error).__name__} on a CPU, from such a config")


def answer(name: str, model: Any, config: Any) -> causal.Answer:
    """What of this model is read. What its config says too is compared."""
    try:
        specs = registry.specs_in(model)
    except UnknownLayerError:
        return causal.Answer(name, "no", REASONS.get(name, "its classes are not declared"))
    left = list(dict.fromkeys(what.partition(":")[2].partition(":")[0] for _, what in registry.unknown_in(model)))
    if left:
        return causal.Answer(name, "in part", REASONS.get(name, f"nobody reads {', '.join(left)}"))
    of = {
        kind: [spec for _, spec in specs if isinstance(spec, kind)] for kind in (ResidualSpec, FinalNormSpec, MLPSpec)
    }
    mixers = [spec for _, spec in specs if isinstance(spec, causal.MIXERS)]
    layers = of[ResidualSpec]
    alone = bool(layers) and all(spec.is_one_block for spec in layers)
    mixed = len({spec.layer_index for spec in of[MLPSpec]} | {s.layer_index for s in layers if s.experts is not None})
    if not layers or len(of[FinalNormSpec]) != 1 or (not alone and (len(mixers) < len(layers) or mixed < len(layers))):
        return causal.Answer(name, "in part", REASONS[name])
    for path, spec in specs:
        assert spec.hidden_size == config.hidden_size, f"spec of {name}, {path}"
        if isinstance(spec, GQASpec) and name not in VARYING:
            heads = config.num_attention_heads
            kv_heads = causal.said(
                config, "num_key_value_heads", default=1 if causal.said(config, "multi_query") else heads
            )
            assert (spec.num_heads, spec.num_kv_heads) == (heads, kv_heads), f"spec of {name}, {path}"
        if isinstance(spec, Mamba2Spec):
            causal.check_mamba2(path, spec, config)
    others = sorted({spec.mixer for spec in mixers if isinstance(spec, OtherMixerSpec)})
    if others:
        return causal.Answer(name, "its stream", f"known by name only: {', '.join(others)}")
    return causal.Answer(name, "in full")


VARYING = ("MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM", "LagunaForCausalLM")
"""Whose layers differ in their heads."""
REASONS: Mapping[str, str] = {
    "FalconH1ForCausalLM": causal.REASONS["FalconH1ForCausalLM"],
    "Zamba2ForCausalLM": causal.REASONS["Zamba2ForCausalLM"],
    "BeamForCausalLM": "its classes are not declared",
    "HrmTextForCausalLM": "two stacks of layers that run in turns over one stream, with norms without weights, which no spec describes",
    "Llama4ForCausalLM": "attention in chunks, which no spec describes",
}  # fmt: skip


def page(found: list[causal.Answer]) -> str:
    """The page of the docs."""
    words = ("in full", "its stream", "in part", "no", "not built")
    counts = {read: sum(each.read == read for each in found) for read in words}
    lines = "\n".join(map(str, found))
    return f"""# Text models of vLLM

Each text architecture of vLLM {RELEASE}, its own classes built without a GPU, on the meta device: from the default config of transformers' class of that
name, or from a small one made for the test. {counts["in full"]} of {len(found)} are read in full: residual stream, attention, delta net or Mamba-2, MLP or experts,
final norm. Of {counts["its stream"]} the stream is read, so that it is planned, and its mixers are known by name. {counts["in part"]} are read in part, {counts["no"]} not at all. {counts["not built"]} were not built, so that nothing is said of them.
`make test-engines` reads them again and compares this page.

| class | read | why not |
|---|---|---|
{lines}
"""


def test_every_architecture_is_read_or_named_with_the_reason(tmp_path: Path) -> None:
    if f"vLLM {RELEASE}, its own" not in PAGE.read_text() and not os.environ.get("UPDATE_DOCS"):
        pytest.skip(f"the page is not of vLLM {RELEASE}")
    found = page(list(answers(tmp_path)))
    if os.environ.get("UPDATE_DOCS"):
        PAGE.write_text(found)
    assert PAGE.read_text() == found


def test_every_class_that_is_declared_is_one_of_vllms() -> None:
    """A misspelt declaration would never be noticed otherwise."""
    declared = [key for key, owner in registry.layer_classes().items() if owner in ("vllm_decoders", "vllm_hybrids")]
    assert len(declared) > 100
    for key in declared:
        assert isinstance(import_model(key), type)


def test_on_the_second_of_two_ranks_each_holds_its_half(tmp_path: Path) -> None:
    names = [
        row.split("`")[1] for row in PAGE.read_text().splitlines() if "| in full |" in row or "| its stream |" in row
    ]
    read = []
    for name in names:
        with contextlib.ExitStack() as stack:
            try:
                model, config = stack.enter_context(built(name, tmp_path, tp=2, rank=1))
            except Exception:  # vLLM's own: experts on a CPU, heads that two ranks cannot share
                continue
            read.append(name)
            for path, spec in registry.specs_in(model):
                assert spec.hidden_size == config.hidden_size, (name, path)
                assert (spec.parallel.size, spec.parallel.rank) == (2, 1), (name, path)
                if isinstance(spec, (GQASpec, MLASpec)):
                    assert spec.num_local_heads * 2 == spec.num_heads, (name, path)
                if isinstance(spec, GQASpec):
                    assert spec.num_local_kv_heads == max(1, spec.num_kv_heads // 2), (name, path)
                if isinstance(spec, (MLPSpec, Mamba2Spec)):
                    assert spec.local_intermediate_size * 2 == spec.intermediate_size, (name, path)
                if isinstance(spec, Mamba2Spec):
                    assert spec.num_local_groups == max(1, spec.num_groups // 2), (name, path)
                    assert spec == spec.shard(1).shard(2, 1), (name, path)
    assert len(read) >= 60, set(names) - set(read)
