"""Every text architecture of vLLM that can be built without a GPU: read in full, or said why not in docs/vllm-classes.md.

Real classes on the meta device, from the default config of transformers' class of that name, or from a small one made here. Run by
`make test-engines`; `UPDATE_DOCS=1` writes the page.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
from vllm_host import config_on_cpu, import_model, published_config, vllm_parallel, without_gpu  # isort: skip  (before vllm)
import census
from vllm.config import CompilationMode, set_current_vllm_config
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS
from vllm.utils.torch_utils import set_default_torch_dtype

from layerfuse import registry

PAGE = census.ROOT / "docs" / "vllm-classes.md"
RELEASE = importlib.metadata.version("vllm")

MORE: Mapping[str, Mapping[str, Any]] = {
    "AfmoeForCausalLM": {
        "score_func": "sigmoid", "route_norm": True, "route_scale": 1.0, "num_dense_layers": 1, "n_group": 1, "topk_group": 1,
    },
    "ApertusForCausalLM": census.SMALL,
    "Glm4MoeForCausalLM": {"head_dim": 128},
    "Glm4MoeLiteForCausalLM": {"first_k_dense_replace": 1},
    "HYV3ForCausalLM": {"first_k_dense_replace": 1, "expert_hidden_dim": 512, "moe_intermediate_size": 512, "route_norm": True},
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

OTHERS: census.Others = {
    **census.OTHERS,
    "DeepseekForCausalLM": (
        "DeepseekV2ForCausalLM",
        {"q_lora_rank": None, "kv_lora_rank": 0, "qk_nope_head_dim": 0, "qk_rope_head_dim": 0, "v_head_dim": 0},
    ),
    "LLaMAForCausalLM": ("LlamaForCausalLM", {}),
    "MiMoV2ForCausalLM": ("MiMoV2FlashForCausalLM", {}),
    "PanguEmbeddedForCausalLM": ("LlamaForCausalLM", {"bias": True}),
    "TeleChat2ForCausalLM": (
        "LlamaForCausalLM",
        {"n_layer": 4, "n_head": 8, "ffn_hidden_size": 1024, "layer_norm_epsilon": 1e-5},
    ),
    "TeleChat3ForCausalLM": ("LlamaForCausalLM", {}),
}
"""Those that transformers has no class for."""

PUBLISHED = {"KimiLinearForCausalLM": "kimi-linear-48b-a3b"}
"""Those whose published config is at hand, and whose default one vLLM does not take."""


def config_of(name: str) -> dict[str, Any]:
    """A config.json."""
    return published_config(PUBLISHED[name]) if name in PUBLISHED else census.config_of(name, OTHERS, MORE)


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


_INKLING = "a convolution over the tokens of what attention and MLP give, in front of the add, which no spec describes"
REASONS: Mapping[str, str] = {
    "Gemma4ForCausalLM": census.causal.REASONS["Gemma4ForCausalLM"],
    "InklingForCausalLM": _INKLING,
    "InklingForConditionalGeneration": _INKLING,
    "Zamba2ForCausalLM": census.causal.REASONS["Zamba2ForCausalLM"],
    "HrmTextForCausalLM": "two stacks of layers that run in turns over one stream, with norms without weights, which no spec describes",
    "Llama4ForCausalLM": "attention in chunks, which no spec describes",
}  # fmt: skip


def test_every_architecture_is_read_or_named_with_the_reason(tmp_path: Path) -> None:
    if f"vLLM {RELEASE}, its own" not in PAGE.read_text() and not os.environ.get("UPDATE_DOCS"):
        pytest.skip(f"the page is not of vLLM {RELEASE}")

    def build(name: str) -> tuple[Any, Any]:
        with built(name, tmp_path) as made:
            return made

    found = list(census.answers(sorted(_TEXT_GENERATION_MODELS), OTHERS, build, REASONS))
    census.check_page(PAGE, "vLLM", RELEASE, found)


def test_every_class_that_is_declared_is_one_of_vllms() -> None:
    """A misspelt declaration would never be noticed otherwise."""
    declared = [key for key, owner in registry.layer_classes().items() if owner in ("vllm_decoders", "vllm_hybrids")]
    assert len(declared) > 100
    for key in declared:
        assert isinstance(import_model(key), type)


def test_on_the_second_of_two_ranks_each_holds_its_half(tmp_path: Path) -> None:
    names = census.read_on(PAGE)
    read = []
    for name in names:
        with contextlib.ExitStack() as stack:
            try:
                model, config = stack.enter_context(built(name, tmp_path, tp=2, rank=1))
            except Exception:  # vLLM's own: experts on a CPU, heads that two ranks cannot share
                continue
            read.append(name)
            census.check_second_of_two(name, registry.specs_in(model), config)
    assert len(read) >= 76, set(names) - set(read)
