"""Shared experts that real SGLang 0.5.23 makes routed ones: what layers say of them, and what a plan says before there are layers.

Run by `make test-engines` in an environment of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import attrs
import pytest

from layerfuse import registry
from layerfuse.adapters import ExpertsSpec, ResidualSpec
from layerfuse.engines.sglang.facts import engine_of
from layerfuse.fusion import FusionConfig, Target, plan
from layerfuse.fusion.sites import stack_of

sglang_layers = pytest.importorskip("sglang_layers")
from sglang.srt.layers.quantization.fp8 import Fp8Config  # noqa: E402
from sglang.srt.models import deepseek_v2, glm4_moe, glm4_moe_lite, qwen2_moe  # noqa: E402
from sglang_host import published_config, server_args, sglang_parallel, without_gpu  # noqa: E402
from sglang_layers import MODELS, build_model, build_of  # noqa: E402
from whole_models import ENTRIES, check_mixture_places  # noqa: E402

SM90 = Target.named("sm90")
NAMED = FusionConfig.parse("silu_mul_group_quant,few_token_linear_group_quant,rms_norm_group_quant")


def mixtures(name: str) -> list[ExpertsSpec]:
    """Those that the entry of a model declares."""
    specs = stack_of(registry.model(ENTRIES.get(name, name)).specs())
    return [found for found in specs.mixtures.values() if found is not None]


@pytest.fixture(autouse=True)
def cuda() -> Iterator[None]:
    """Models that ask are told of an H100 (`CUDA_CAPABILITY`)."""
    with contextlib.ExitStack() as stack:
        for module in (deepseek_v2, glm4_moe, glm4_moe_lite, qwen2_moe):
            stack.enter_context(mock.patch.object(module, "_is_cuda", True))
        yield


def declared(name: str) -> str | None:
    """What a plan says of an entry's shared experts."""
    entry = registry.model(ENTRIES.get(name, name))
    return engine_of(entry.architectures, target=SM90, mixtures=mixtures(name)).shared_routed


@pytest.mark.parametrize("name", [name for name in MODELS if any(found.shared is not None for found in mixtures(name))])
def test_a_plan_says_of_an_entry_what_sglang_builds(name: str) -> None:
    specs = registry.specs_in(build_model(name, tp=2, rank=1))
    read = [spec.experts for _, spec in specs if isinstance(spec, ResidualSpec) and spec.experts is not None]
    assert {each.shared is None for each in read} == {declared(name) is not None}


def test_of_glm_4_5_and_under_expert_parallelism_sglangs_own_class_says_the_same() -> None:
    config = SimpleNamespace(n_shared_experts=1)
    assert "shared expert one of the routed ones" in (declared("glm-4.5") or "")
    for more, kept in (({}, False), ({"ep_size": 2}, True)):
        with (
            server_args(published_config("deepseek-v3"), tp=2, patch={}, **more) as given,
            without_gpu(),
            sglang_parallel(given, 0),
        ):
            why = glm4_moe.Glm4MoeForCausalLM.shared_experts_fusion_disable_reason(config, None)
        assert (why is not None) == kept


def deepseek(**arguments: Any) -> Any:
    config = {**published_config("deepseek-v3"), "num_hidden_layers": 2, "first_k_dense_replace": 1}
    quantised = Fp8Config(is_checkpoint_fp8_serialized=True, weight_block_size=[128, 128])
    return build_of(config, rank=1, tp=8, pp=1, patch={}, quantised=quantised, **arguments)[0]


@pytest.mark.parametrize(
    ("arguments", "fused"),
    [
        ({}, 1),
        ({"disable_shared_experts_fusion": True}, 0),
        ({"ep_size": 8}, 0),
        ({"moe_runner_backend": "flashinfer_trtllm"}, 0),
    ],
)
def test_a_layer_says_its_256_routed_experts_and_has_the_sites_that_are_there(arguments: Any, fused: int) -> None:
    model = deepseek(**arguments)
    layer = model.get_submodule("model.layers.1")
    assert layer.mlp.num_fused_shared_experts == fused
    experts = registry.spec_for(layer, ResidualSpec).experts
    assert isinstance(experts, ExpertsSpec)
    assert (experts.num_experts, experts.experts_per_token) == (256, 8)
    assert (experts.shared is None) == bool(fused)
    assert check_mixture_places(model) >= 2
    engine = attrs.evolve(engine_of(["DeepseekV3ForCausalLM"]), loaded=True)
    found = plan(registry.specs_in(model), SM90, NAMED, engine)
    mixture = [site for site in found.sites if site.spec.layer_index == 1]
    linears = ["self_attn.fused_qkv_a_proj_with_mqa", "self_attn.q_b_proj", "self_attn.o_proj"]
    if not fused:
        linears += ["mlp.shared_experts.gate_up_proj", "mlp.shared_experts.down_proj"]
    assert {site.path for site in mixture if site.linear is not None} == {f"model.layers.1.{path}" for path in linears}
    assert sum(site.role == "activation" for site in mixture) == (not fused)
