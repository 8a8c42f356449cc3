"""Whole real vLLM models, built without a GPU, against what models.toml declares of them.

Run by `make test-engines` in an environment of its own.
"""

from __future__ import annotations

import collections
import importlib
import json
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import pytest
import torch

from layerfuse import registry
from layerfuse.adapters import (
    ActivationQuant,
    LinearSpec,
    MLASpec,
    ParallelConflictError,
    ResidualSpec,
    SpecError,
    WeightSpec,
    describe_linear_quant,
)
from layerfuse.adapters.specs import AnySpec, Parallel
from layerfuse.fusion import FusionConfig, Plan, Target, plan
from layerfuse.registry.inspect import read_modelopt
from layerfuse.testing.compare import linears_of, misfit

vllm_layers = pytest.importorskip("vllm_layers")
from vllm.config import set_current_vllm_config  # noqa: E402
from vllm_host import vllm_config, vllm_parallel, without_gpu  # noqa: E402
from vllm_layers import MODELS, build_model, fp8_kernel  # noqa: E402
from whole_models import (  # noqa: E402
    ENTRIES,
    check_changed,
    check_every_layer,
    check_kernel_layers,
    check_mixture_places,
    norms_that_feed_nothing,
)

from layerfuse.engines.vllm import native_fusions  # noqa: E402
from layerfuse.engines.vllm.releases import engine_of  # noqa: E402

PLACE = native_fusions.Place(vendor="nvidia", arch="sm90")


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_and_its_linears_read_as_declared_however_many_ranks_share_them(name: str) -> None:
    """A rank's linears are its share of the model's, and its copies: vLLM's own totals count those once per rank."""
    alone: dict[str, LinearSpec] = {}
    for tp in MODELS[name].tp_sizes:
        rank = 5 if tp == 8 else tp - 1
        model = build_model(name, tp=tp, rank=rank)
        check_every_layer(model, "vllm", name, tp, rank, all_dense="first_k_dense_replace" in MODELS[name].overrides)

        # Kernel layers hold what their outer layer holds on this rank.
        kernels = check_kernel_layers(model)
        # The sparse and the Kimi layers of the CUDA classes are their own kernel layers.
        assert (kernels == 0) == (name in {"deepseek-v3.2", "deepseek-v3.2-rocm", "glm-5", "kimi-linear", "kimi-k3"})

        for path, spec in registry.specs_in(model):
            for linear, side, width, local_width in linears_of(spec):
                assert misfit(linear, side, width, local_width, tp) is None, (path, tp)
                weight = model.get_submodule(path).get_submodule(linear.path).weight
                assert (linear.local_out_features, linear.local_in_features) == tuple(weight.shape)
                first = alone.setdefault(f"{path}.{linear.path}", linear)
                assert (linear.in_features, linear.out_features) == (first.in_features, first.out_features), (path, tp)
                assert linear.style == first.style and len(linear.local_outputs) >= len(first.local_outputs)
    assert alone and all(linear.weight is not None for linear in alone.values())

    # The key/value latent goes to the cache, and some models have nothing but mixtures after their attention.
    mixtures = name.startswith("gpt-oss") or name in ("qwen3-next", "qwen3.5-35b")
    allowed = "post_attention_layernorm" if mixtures else "kv_a_layernorm"
    assert {found.partition(".")[2] for found in norms_that_feed_nothing(model)} <= {allowed}


def test_the_wrapper_inside_an_mla_layer_reads_the_same_though_its_num_heads_is_the_ranks() -> None:
    layer = build_model("deepseek-v3", tp=8, rank=5).get_submodule("model.layers.0.self_attn")

    assert layer.num_heads == 128
    assert layer.mla_attn.num_heads == 16
    assert registry.spec_for(layer.mla_attn) == registry.spec_for(layer)


@pytest.mark.skipif("kimi-linear" not in MODELS, reason="this release has no such class")
def test_a_kimi_linear_model_holds_both_kinds_where_the_checkpoint_puts_them() -> None:
    specs = registry.specs_in(build_model("kimi-linear", tp=8, rank=5))

    kinds = collections.Counter(type(spec).__name__ for _, spec in specs)
    assert kinds == {"ResidualSpec": 27, "GatedDeltaNetSpec": 20, "MLASpec": 7, "GatedMLPSpec": 27, "FinalNormSpec": 1}
    assert [spec.layer_index for _, spec in specs if isinstance(spec, MLASpec)] == [3, 7, 11, 15, 19, 23, 26]


def test_more_ranks_than_kv_heads_is_refused_by_name_in_vllms_gpt_oss() -> None:
    """Its local count is a plain floor division: 8 KV heads over 16 ranks are 0, which no kernel can run."""
    layer = build_model("gpt-oss-20b", tp=8, rank=5).get_submodule("model.layers.0.attn")
    layer.num_local_key_value_heads = 8 // 16

    with pytest.raises(SpecError, match="num_local_kv_heads: expected at least 1, got 0"):
        registry.spec_for(layer)


def test_a_layer_that_contradicts_the_caller_is_an_error() -> None:
    layer = build_model("deepseek-v3", tp=8, rank=5).get_submodule("model.layers.0.self_attn")

    with pytest.raises(ParallelConflictError, match="says 8, the parallel argument says 4"):
        registry.spec_for(layer, parallel=Parallel(size=4, rank=0))


# ---- what fp8 linears quantise

BLOCK = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
STATIC = {"quant_method": "fp8", "activation_scheme": "static"}
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}


def compressed(activations: dict[str, object], **weights: object) -> dict[str, object]:
    group = {
        "targets": ["Linear"],
        "weights": {**FLOAT8, "dynamic": False, **weights},
        "input_activations": {**FLOAT8, "dynamic": True, **activations},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"all": group},
        "ignore": ["lm_head"],
    }


PER_TOKEN = compressed({"strategy": "token"}, strategy="channel")
PER_GROUP = compressed({"strategy": "group", "group_size": 128}, strategy="block", block_structure=[128, 128])
COLUMN_MAJOR = ActivationQuant(group_size=128, column_major=True)
IN_BLOCKS = WeightSpec(dtype="float8_e4m3fn", scheme="block", block=(128, 128))
WEIGHTS = {
    id(BLOCK): IN_BLOCKS,
    id(PER_GROUP): IN_BLOCKS,
    id(STATIC): attrs.evolve(IN_BLOCKS, scheme="tensor", block=None),
    id(PER_TOKEN): attrs.evolve(IN_BLOCKS, scheme="channel", block=None),
}
FP8 = {
    "block, DeepGEMM": (BLOCK, "deep_gemm:DeepGemmFp8BlockScaledMMKernel", COLUMN_MAJOR),
    "block, CUTLASS": (BLOCK, "cutlass:CutlassFp8BlockScaledMMKernel", COLUMN_MAJOR),
    "block, Triton": (BLOCK, "triton:TritonFp8BlockScaledMMKernel", ActivationQuant(group_size=128)),
    "block, FlashInfer": (
        BLOCK,
        "flashinfer:FlashInferFp8DeepGEMMDynamicBlockScaledKernel",
        ActivationQuant(group_size=128, column_major=True, tma_aligned=True, inside=True),
    ),
    "block, Marlin": (BLOCK, "marlin:MarlinFP8ScaledMMLinearKernel", None),
    "static": (STATIC, "cutlass:CutlassFP8ScaledMMLinearKernel", ActivationQuant(fixed="static")),
    "compressed-tensors, per token": (PER_TOKEN, "cutlass:CutlassFP8ScaledMMLinearKernel", ActivationQuant()),
    "compressed-tensors, block": (PER_GROUP, "cutlass:CutlassFp8BlockScaledMMKernel", COLUMN_MAJOR),
}


@pytest.mark.parametrize(("quantization", "kernel", "expected"), FP8.values(), ids=FP8)
def test_what_an_fp8_linear_quantises_is_read_off_the_kernel_that_vllm_gave_it(
    quantization: dict[str, object], kernel: str, expected: ActivationQuant | str | None
) -> None:
    with fp8_kernel(kernel):
        model = build_model("deepseek-v3", first_k_dense_replace=1000, quantization_config=quantization)
    decoder = model.get_submodule("model.layers.0")
    described = describe_linear_quant(decoder.self_attn.q_b_proj)
    quant = expected if isinstance(expected, ActivationQuant) else None
    assert described == quant or (isinstance(expected, str) and expected in described)

    attention, stream = registry.spec_for(decoder.self_attn), registry.spec_for(decoder)
    assert (attention.q_norm.quant, stream.input_norm.quant, stream.post_attention_norm.quant) == (quant,) * 3
    (linear,) = attention.q_norm.consumers
    assert linear.activation == described and linear.weight == WEIGHTS[id(quantization)]
    assert attention.kv_norm.quant is None
    assert registry.spec_for(decoder.mlp).quant == quant


_NVFP4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
NVFP4 = {
    "compressed-tensors": (
        "compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4",
        {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "config_groups": {
                "all": {
                    "targets": ["Linear"],
                    "weights": {**_NVFP4, "dynamic": False},
                    "input_activations": {**_NVFP4, "dynamic": "local"},
                }
            },
            "ignore": ["lm_head"],
        },
    ),
    "modelopt": (
        "modelopt",
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]},
    ),
}


@pytest.mark.parametrize("kernel", ["cutlass:CutlassNvFp4LinearKernel", "marlin:MarlinNvFp4LinearKernel"])
@pytest.mark.parametrize("written_by", NVFP4)
def test_a_linear_in_nvfp4_is_read_off_the_kernel_that_vllm_gave_it(written_by: str, kernel: str) -> None:
    chooses, quantization = NVFP4[written_by]
    file, name = kernel.split(":")
    kernels = "vllm.model_executor.kernels.linear.nvfp4"
    config = importlib.import_module(f"{kernels}.base").NvFp4LinearLayerConfig()
    made = getattr(importlib.import_module(f"{kernels}.{file}"), name)
    with mock.patch(
        f"vllm.model_executor.layers.quantization.{chooses}.init_nvfp4_linear_kernel", return_value=mock.Mock()
    ) as chosen:
        chosen.side_effect = lambda **_: made(config)
        with mock.patch.object(made, "is_supported", return_value=(True, None)):
            model = build_model("deepseek-v3", first_k_dense_replace=1000, quantization_config=quantization)
    decoder = model.get_submodule("model.layers.0")
    quant = ActivationQuant(fixed="nvfp4", swizzled=True) if file == "cutlass" else None
    attention, stream = registry.spec_for(decoder.self_attn), registry.spec_for(decoder)
    assert (attention.q_norm.quant, stream.input_norm.quant, stream.post_attention_norm.quant) == (quant,) * 3
    (linear,) = attention.q_norm.consumers
    assert linear.activation == quant and linear.weight == WeightSpec(
        dtype="float4_e2m1fn", scheme="group", block=(1, 16)
    )
    assert (linear.in_features, linear.out_features) == (1536, 24576)


def test_packed_integers_say_their_groups_and_sizes() -> None:
    """Their weight is no tensor of out_features by in_features: the sizes are the module's own."""
    from vllm.model_executor.kernels.linear.mixed_precision.marlin import MarlinLinearKernel

    integers = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
    group = {"targets": ["Linear"], "weights": integers, "input_activations": None}
    packed = {"format": "pack-quantized", "config_groups": {"all": group}, "ignore": ["lm_head"]}
    schemes = "vllm.model_executor.layers.quantization.compressed_tensors.schemes"
    with mock.patch(f"{schemes}.compressed_tensors_wNa16.choose_mp_linear_kernel", return_value=MarlinLinearKernel):
        quantization = {"quant_method": "compressed-tensors", **packed}
        model = build_model("deepseek-v3", tp=2, first_k_dense_replace=1000, quantization_config=quantization)
    (linear,) = registry.spec_for(model.get_submodule("model.layers.0.self_attn")).q_norm.consumers
    assert linear.weight == WeightSpec(dtype="int4", scheme="group", block=(1, 128))
    assert (linear.local_in_features, linear.local_out_features, linear.activation) == (1536, 12288, None)


def test_a_linear_that_takes_its_input_quantised_says_so() -> None:
    """As vLLM's own producers ask it: set by the scheme when it makes the weights, and hidden where LoRA needs the input as it is."""
    from vllm.model_executor.layers.fusion.quant_activation import get_input_quant_key

    static = compressed({"strategy": "tensor", "dynamic": False}, strategy="tensor")
    for quantization, takes in ((PER_TOKEN, False), (static, True)):
        with fp8_kernel("cutlass:CutlassFP8ScaledMMLinearKernel"):
            model = build_model("deepseek-v3", first_k_dense_replace=1000, quantization_config=quantization)
        layer = model.get_submodule("model.layers.0.self_attn")
        assert (get_input_quant_key(layer.q_b_proj) is not None) == takes
        assert registry.spec_for(layer).q_norm.consumers[0].takes_quantised == takes
    layer.q_b_proj.requires_unquantized_input = True
    assert not registry.spec_for(layer).q_norm.consumers[0].takes_quantised


def test_kv_heads_that_ranks_have_copies_of_are_counted_once() -> None:
    """Two of them, of 256 columns, over eight ranks: vLLM's `output_size` has eight."""
    decoder = build_model("qwen3-next", tp=8, rank=5).get_submodule("model.layers.3")
    (linear,) = registry.spec_for(decoder).input_norm.consumers
    assert linear.out_features == 2 * 16 * 256 + 2 * 2 * 256 < decoder.self_attn.qkv_proj.output_size
    assert linear.local_outputs == (2 * 2 * 256, 256, 256)


CHANGED = [
    ("deepseek-v3", None),
    ("deepseek-v3", BLOCK),
    ("gpt-oss-20b", None),
    ("kimi-linear", None),
    ("qwen3-next", None),
]


@pytest.mark.parametrize(("name", "quant"), [each for each in CHANGED if each[0] in MODELS])
def test_a_layer_that_was_changed_is_what_it_is_now(name: str, quant: dict[str, object] | None) -> None:
    told = {} if quant is None else {"quantization_config": quant}
    with fp8_kernel("deep_gemm:DeepGemmFp8BlockScaledMMKernel"):
        check_changed(build_model(name, tp=2, rank=1, **told))


# ---- experts

MIXTURES: dict[str, tuple[int, int, int, int | None]] = {
    "deepseek-v2-lite": (64, 6, 1408, 2816),
    "deepseek-v3": (256, 8, 2048, 2048),
    "kimi-k2": (384, 8, 2048, 2048),
    "kimi-k2.5": (384, 8, 2048, 2048),
    "kimi-linear": (256, 8, 1024, 1024),
    "glm-4.7-flash": (64, 4, 1536, 1536),
    "gpt-oss-20b": (32, 4, 2880, None),
    "gpt-oss-120b": (128, 4, 2880, None),
    "qwen3-next": (512, 10, 512, 512),
    "qwen3.5-35b": (256, 8, 512, 512),
}
"""Experts, those of a token, the width of one and that of the shared ones, as published."""


@pytest.mark.parametrize("whole", [True, False], ids=["ep", "tp"])
@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_is_read_with_what_each_rank_has_of_it(name: str, whole: bool) -> None:
    """Whole experts, or an even share of the columns of each."""
    total, each, width, shared = MIXTURES[name]
    for tp, rank in ((1, 0), (2, 1)):
        model = build_model(name, tp=tp, rank=rank, whole_experts=whole, num_hidden_layers=3, first_k_dense_replace=1)
        mixtures = [spec.experts for _, spec in registry.specs_in(model) if isinstance(spec, ResidualSpec)]
        found = mixtures[-1]
        assert found is not None and (mixtures[0] is None) != name.startswith(("gpt-oss", "qwen"))
        assert (found.num_experts, found.experts_per_token, found.intermediate_size) == (total, each, width)
        local = (total // tp, width) if whole else (total, width // tp)
        assert (found.num_local_experts, found.local_intermediate_size) == local
        assert found.router is not None and (found.router.out_features, found.router.style) == (total, "replicated")
        assert (found.weight.dtype, found.weight.scheme, found.activation) == ("bfloat16", "plain", None)
        assert (None if found.shared is None else found.shared.intermediate_size) == shared
        assert found.shared is None or found.shared.local_intermediate_size == shared // tp
        assert check_mixture_places(model) == 3


def test_quantised_experts_say_so() -> None:
    with fp8_kernel("triton:TritonFp8BlockScaledMMKernel"):
        model = build_model("deepseek-v3", num_hidden_layers=4, quantization_config=BLOCK)
    found = registry.spec_for(model.get_submodule("model.layers.3")).experts
    assert found is not None and found.weight == WeightSpec(dtype="float8_e4m3fn", scheme="block", block=(128, 128))
    assert found.activation == "RoutedExperts quantises activations inside its matrix product"


# ---- a plan made from published dimensions, and one from the layers of the same model

QUANTISED = "rms_norm_group_quant", "add_rms_norm_group_quant", "silu_mul_group_quant", "mla_dual_rms_norm_group_quant"
SWITCHED = dict.fromkeys((*QUANTISED, "gated_rms_norm_group_quant", "add_rms_norm", "mla_dual_rms_norm"), True)


@pytest.mark.parametrize("name", MODELS)
def test_a_plan_from_published_dimensions_promises_what_the_layers_themselves_do(name: str) -> None:
    """In front of experts, and in shared ones, nothing is quantised: vLLM's op for experts takes what it reads as it is."""
    with fp8_kernel("triton:TritonFp8BlockScaledMMKernel"):
        model = build_model(name, quantization_config=BLOCK)
    entry, target = registry.model(ENTRIES.get(name, name)), Target.named("sm90")
    if "first_k_dense_replace" in MODELS[name].overrides:
        entry = attrs.evolve(entry, mlps={"dense": attrs.evolve(entry.mlps["dense"], at="all")}, experts=None)
    read, config = registry.specs_in(model), FusionConfig(level=2, switches=SWITCHED)
    for engine in (native_fusions.compiled(PLACE), engine_of(entry.architectures, target=target)):
        real = plan(read, target, config, engine)
        declared = attrs.evolve(config, quant=ActivationQuant(group_size=128))
        beforehand = plan(map(in_blocks, entry.specs(engine="vllm")), target, declared, engine)
        (found, linears), (wanted, read_linears) = (without_linears(taken(each)) for each in (beforehand, real))
        assert found == wanted
        # Without its absorption the latents' second projection is a linear too, and K3 merges a gate into the first, which no spec says.
        if not name.endswith("mla-off") and not name.startswith("kimi-k3"):
            unsized = sum("not known: how large its weight is" in each.reason for each in beforehand.decisions)
            assert linears <= read_linears <= linears + unsized
        assert behind_experts(beforehand) == behind_experts(real)


def in_blocks(placed: tuple[str, AnySpec]) -> tuple[str, AnySpec]:
    """A declared layer, the experts of which are held as the model's are: a plan is told of activations alone."""
    path, spec = placed
    mixed = isinstance(spec, ResidualSpec) and spec.experts is not None
    return path, attrs.evolve(spec, experts=attrs.evolve(spec.experts, weight=IN_BLOCKS)) if mixed else spec


def behind_experts(made: Plan) -> dict[object, int]:
    """How often a quantised fusion stands in front of a mixture or in its shared experts, and what is said of it."""
    quantised = [d for d in made.decisions if d.fusion in QUANTISED and made.site[d.site].experts is not None]
    shared = [d for d in quantised if made.site[d.site].experts.shared is not None]
    return collections.Counter((made.site[d.site].role, d.fusion, d.kind) for d in shared)


def without_linears(found: dict[tuple[object, ...], int]) -> tuple[dict[tuple[object, ...], int], int]:
    """The other roles, and how many linears take a fusion."""
    others = {key: sites for key, sites in found.items() if key[0] != "linear"}
    return others, sum(found.values()) - sum(others.values())


def taken(made: Plan) -> dict[tuple[object, ...], int]:
    """How often a layer takes a fusion at a role, or falls back to it; linears of all layers together, as a residual stream may list those of its attention."""
    return collections.Counter(
        (site.role, site.spec.layer_index if site.linear is None else None, d.fusion, d.kind)
        for d, site in ((d, made.site[d.site]) for d in made.decisions)
        if d.kind in ("expected", "fallback")
    )


@pytest.mark.skipif("deepseek-v3.2" not in MODELS, reason="this release has no such code")
def test_without_flashinfer_vllms_fused_all_reduce_is_an_all_reduce_and_a_norm() -> None:
    """Which is what the reason in a plan of such a model says."""
    from vllm.model_executor.layers import fused_allreduce_gemma_rms_norm as code
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.models.common.ops.fused_allreduce_rms_norm import fused_allreduce_rms_norm

    x, calls = torch.randn(3, 64), []
    with without_gpu(), set_current_vllm_config(vllm_config("deepseek-v3.2", tp=2, rank=0, overrides={})):
        norm = RMSNorm(64)
        norm.forward = lambda *tensors: calls.append(len(tensors)) or tensors
        with vllm_parallel(2, 0):
            assert not code._can_use_flashinfer(x, 2)[0]
            fused_allreduce_rms_norm(x, x, norm)
    assert calls == [2]
    rows = [each for each in native_fusions.CODE if "all_reduce_add_rms_norm" in each.fusions]
    assert rows and {row.vendor for row in rows} == {"nvidia"}
    said = f"{native_fusions.NEEDS_FLASHINFER}, and else an all-reduce and a norm with its add"
    assert all(row.by.endswith(said) for row in rows)


@pytest.mark.parametrize("said", [None, {"quant_method": "fp8", "activation_scheme": "static"}])
def test_modelopts_own_file_counts_as_layerfuse_reads_it(said: dict[str, Any] | None, tmp_path: Path) -> None:
    """Where the config has no `quantization_config`; by the name that vLLM gives the file."""
    from vllm.model_executor.layers.quantization.modelopt import ModelOptFp8Config
    from vllm.transformers_utils.config import get_config

    (name,) = ModelOptFp8Config.get_config_filenames()
    own = {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": {"quant_algo": "FP8"}}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    config |= {} if said is None else {"quantization_config": said}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_modelopt(tmp_path) is None
    (tmp_path / name).write_text(json.dumps(own))
    assert read_modelopt(tmp_path) == own
    assert get_config(str(tmp_path), trust_remote_code=False).quantization_config == (said or own)
    assert ModelOptFp8Config.from_config(own).quant_method == "FP8"
