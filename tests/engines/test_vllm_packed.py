"""The `packed_modules_mapping` of vLLM's own model classes, against what follows from the specs of transformers' models."""

from __future__ import annotations

from importlib import import_module

import pytest

pytest.importorskip("vllm")
from vllm_host import without_gpu  # isort: skip  (before vllm's models)

from layerfuse import registry
from layerfuse.registry.machinery import packed_modules
from layerfuse.testing.models import full_model, why_not

CLASSES = {
    "llama-3.1-8b": "llama:LlamaForCausalLM",
    "qwen2.5-7b": "qwen2:Qwen2ForCausalLM",
    "qwen3-8b": "qwen3:Qwen3ForCausalLM",
    "gemma-2-9b": "gemma2:Gemma2ForCausalLM",
    "gemma-3-1b": "gemma3:Gemma3ForCausalLM",
    "phi-4": "phi3:Phi3ForCausalLM",
    "granite-3.3-8b": "granite:GraniteForCausalLM",
    "mixtral-8x7b": "mixtral:MixtralForCausalLM",
    "minimax-m2.5": "minimax_m2:MiniMaxM2ForCausalLM",
    "gpt-oss-20b": "gpt_oss:GptOssForCausalLM",
    "ernie-4.5-21b-a3b": "ernie45_moe:Ernie4_5_MoeForCausalLM",
    "qwen3-next-80b-a3b": "qwen3_next:Qwen3NextForCausalLM",
}


@pytest.mark.parametrize("name", CLASSES)
def test_what_follows_from_the_specs_is_what_vllm_says(name: str) -> None:
    entry = registry.model(name)
    if why_not(entry):
        pytest.skip(why_not(entry))
    module, _, cls = CLASSES[name].partition(":")
    with without_gpu():
        theirs = getattr(import_module(f"vllm.model_executor.models.{module}"), cls).packed_modules_mapping
    ours = packed_modules(registry.specs_in(full_model(entry)))
    # Gates of delta nets, and what is not read by a norm alone, no spec names.
    assert ours == {merged: parts for merged, parts in theirs.items() if merged in ours}
    assert ours and set(theirs) - set(ours) <= {"in_proj_ba", "qkv"}
