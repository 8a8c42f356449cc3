"""Stages of `bench/scripts/workloads.toml` whose models vLLM does not compile: its classes take the configs, and plans expect what is said here.

Real classes on the meta device, with FlashInfer's fp8 linears as installed on Hopper. Run by `make test-engines`.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import attrs
import pytest

pytest.importorskip("vllm_layers")
from vllm_layers import fp8_kernel  # isort: skip  (before vllm)
from vllm_defaults import DEFAULTS, Recipe, build_in  # isort: skip  (before vllm)
import by_hand
import vllm

from layerfuse import registry
from layerfuse.engines.vllm import register
from layerfuse.engines.vllm.native_fusions import Place, uncompiled
from layerfuse.engines.vllm.seams import SEAMS
from layerfuse.fusion import FusionConfig, Target, plan

sys.path.append(str(Path(__file__).parents[2] / "bench" / "scripts"))
from vllm_shapes import folder_of
from workloads import STAGES

pytestmark = pytest.mark.skipif(
    not by_hand.listed(Path(vllm.__file__).parent), reason="this vLLM names no architecture that it does not compile"
)
FLASHINFER = "flashinfer:FlashInferFp8DeepGEMMDynamicBlockScaledKernel"
V32 = Recipe("", "vllm.models.deepseek_v32.nvidia.model:DeepseekV32ForCausalLM")
RECIPES = {
    **DEFAULTS,
    "DeepseekV32ForCausalLM": V32,
    "GlmMoeDsaForCausalLM": V32,
    "KimiLinearForCausalLM": Recipe("", "vllm.models.kimi_k3.nvidia.model:KimiLinearForCausalLM"),
}
ADD, ADD_QUANT, FIRST = "add_rms_norm", "add_rms_norm_group_quant", "rms_norm_group_quant"
REDUCED = "all_reduce_add_rms_norm"
SILU, FEW = "silu_mul_group_quant", "few_token_linear_group_quant"
_DENSE = {
    "norms": {ADD_QUANT: 11},
    "seams": {ADD_QUANT: 11, SILU: 6, ADD: 1},
    "linears": {ADD_QUANT: 11, SILU: 6, ADD: 1, FEW: 17},
}
_MIXED = {
    "norms": {ADD_QUANT: 2},
    "seams": {ADD_QUANT: 2, ADD: 4},
    "linears": {ADD_QUANT: 2, ADD: 4, FEW: 8},
}
EXPECTED: dict[str, dict[str, dict[str, int]]] = {
    # Of six layers; the first norm is in one kernel with the embedding, the last reads no linear in fp8.
    "deepseek-v3.2-rank8-dense": _DENSE,
    "glm-5-rank8-dense": _DENSE,
    # Of three.
    "deepseek-v3.2-rank8-mixture": _MIXED,
    "glm-5-rank8-mixture": _MIXED,
    # The first of the twelve norms behind an all-reduce is behind the attention of the first layer.
    "deepseek-v3.2-rank8-dense-tp2": {
        "all_reduce": {REDUCED: 12},
        "quantised": {REDUCED: 1, f"{REDUCED}_group_quant": 11},
        "linears": {REDUCED: 1, f"{REDUCED}_group_quant": 11, SILU: 6, FEW: 17},
    },
    # Three delta nets and one attention.
    "kimi-k3-rank8-dense": {"norms": {"gated_rms_norm": 3}, "seams": {"gated_rms_norm": 3, "mla_dual_rms_norm": 1}},
    "minimax-m3-rank8-dense": {"norms": {ADD: 12}},
    "minimax-m3-rank8-mixture": {"norms": {ADD: 8}},
    "minimax-m3-rank8-dense-fp8": {
        "norms": {FIRST: 1, ADD_QUANT: 11, ADD: 1},
        "linears": {FIRST: 1, ADD_QUANT: 11, ADD: 1, FEW: 12},
    },
    "minimax-m3-rank8-mixture-fp8": {
        "norms": {FIRST: 1, ADD_QUANT: 3, ADD: 5},
        "linears": {FIRST: 1, ADD_QUANT: 3, ADD: 5, FEW: 12},
    },
}
"""Stage -> arm -> fusion -> sites."""


@pytest.mark.parametrize("name", EXPECTED)
def test_what_a_stage_expects(name: str, tmp_path: Path) -> None:
    register()
    stage = STAGES["vllm"][name]
    tp, folder = stage.tp, folder_of(stage.shape, tmp_path)
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    with fp8_kernel(FLASHINFER):
        model, _ = build_in(str(folder), architecture, RECIPES[architecture], tp=tp, rank=tp - 1)
    engine = uncompiled(
        "it is uncompiled", [architecture], Place(vendor="nvidia", arch="sm90", ranks=tp), (s.fusion for s in SEAMS)
    )
    specs, found = registry.specs_in(model), {}
    for arm, each in stage.arms.items():
        asked = FusionConfig.parse(",".join(each.fusions), origin="the stage")
        planned = plan(specs, Target.named("sm90"), asked, attrs.evolve(engine, loaded=True))
        found[arm] = dict(Counter(decision.fusion for decision in planned.expected()))
    assert found == EXPECTED[name]
