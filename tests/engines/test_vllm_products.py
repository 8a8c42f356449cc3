"""Block fp8 products as vLLM has them without FlashInfer, by DeepGEMM and by CUTLASS: layerfuse multiplies few tokens, they multiply more.

Both kernels are plain torch here, behind vLLM's own ops. Run by `make test-engines` in an environment of its own.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

pytest.importorskip("vllm_started")
from few_token_linears import BLOCKS, everywhere
from reports import Said, told
from test_vllm_inside import DEEP_GEMM, _deep_gemm, _product, laid, multiplying, seen
from test_vllm_plugin import ADD, DUAL, GROUP_FP8, ONE_FP8
from torch import Tensor, nn
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx
from vllm.config.lora import LoRAConfig
from vllm.lora.layers import LoRAMapping
from vllm.lora.model_manager import create_lora_manager
from vllm_host import _C
from vllm_started import close, started

from layerfuse import registry
from layerfuse.adapters.specs import NormSpec
from layerfuse.engines.vllm import inside, loading, products
from layerfuse.fusion import Engine, FusionConfig, Target, plan
from layerfuse.fusion.backends import counting

_SCHEMA = "cutlass_scaled_mm(Tensor! out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, Tensor? bias) -> ()"


def _cutlass(out: Tensor, a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, bias: Tensor | None) -> None:
    seen.append(("CUTLASS", a.dtype, len(out)))
    if a_scales.numel() in (1, len(a)) and b_scales.numel() in (1, b.shape[1]):
        product = (a.float() @ b.float()) * b_scales.view(1, -1) * a_scales.view(-1, 1)
        out.copy_(product + (0 if bias is None else bias))
        return
    rows = a.float() * a_scales.repeat_interleave(128, -1)[:, : a.shape[-1]]
    out.copy_(_product(rows, b.t(), b_scales.t()) + (0 if bias is None else bias))


if not hasattr(torch.ops._C, "cutlass_scaled_mm"):
    _C.define(_SCHEMA)
    _C.impl("cutlass_scaled_mm", _cutlass, "CPU")
    torch.library.register_fake("_C::cutlass_scaled_mm", lambda *_: None, lib=_C)

IN_GRAPHS, SHARED = 8, 2
"""Linears of two layers of DeepSeek-V3, and those of shared experts, which no graph shows."""


@pytest.mark.parametrize(
    ("way", "powers_of_two", "aligned"),
    [
        pytest.param("DeepGEMM", False, False, marks=pytest.mark.thorough),
        ("DeepGEMM", True, True),
        ("CUTLASS", False, False),
    ],
)
def test_few_tokens_are_layerfuses_and_more_are_multiplied_as_before(
    way: str, powers_of_two: bool, aligned: bool, tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales lie as vLLM lays them: column by column, for DeepGEMM each column on 16 bytes where vLLM does that."""
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM_TMA_ALIGNED_SCALES", str(int(aligned)))
    options = {"fusions": "all", "strict": True}
    with (
        multiplying(way, powers_of_two),
        started("deepseek-v3", tmp_path, layerfuse=options, dtype="bfloat16", overrides=GROUP_FP8) as engine,
    ):
        engine()  # compiles
        for tokens in (1, 16, 17):
            seen.clear()
            laid.clear()
            with counting() as called:
                fused, mine = engine(tokens), seen.copy()
            assert called["block_scaled_linear"] == IN_GRAPHS
            assert laid == ({(1, -(-tokens // 4) * 4 if aligned else tokens)} if way == "DeepGEMM" else set())
            assert mine == [(way, torch.float8_e4m3fn, tokens)] * (SHARED + (IN_GRAPHS if tokens > 16 else 0))
            seen.clear()
            assert close(fused, engine.uncompiled(tokens))
            assert seen == [(way, torch.float8_e4m3fn, tokens)] * (SHARED + IN_GRAPHS)
    assert told(BLOCKS, IN_GRAPHS) in said()


def test_a_linear_inside_of_loras_is_the_one_of_the_plan(tmp_path: Path, said: Said) -> None:
    chains = f"+{ADD}_group_quant,+rms_norm_group_quant,+{DUAL}_group_quant"
    options = {"fusions": f"{chains},+{BLOCKS}", "strict": True}
    with (
        multiplying("CUTLASS"),
        started("deepseek-v3", tmp_path, layerfuse=options, dtype="bfloat16", overrides=ONE_FP8) as engine,
    ):
        config = engine.config
        config.lora_config = LoRAConfig(max_lora_rank=8, max_loras=1, lora_dtype=torch.bfloat16)
        manager = create_lora_manager(engine.model, 4, 64, 128, config.lora_config, config, torch.device("cpu"))
        manager.set_adapter_mapping(LoRAMapping((0,) * 6, (0,), is_prefill=True))
        engine()
    assert told(BLOCKS, 5) in said()


@pytest.mark.parametrize("fusions", [pytest.param(ADD, marks=pytest.mark.thorough), f"{ADD}_group_quant"])
def test_without_a_quantised_fusion_or_their_own_they_stay(fusions: str, tmp_path: Path) -> None:
    options = {"fusions": fusions, "strict": True}
    with (
        multiplying("CUTLASS"),
        started("deepseek-v3", tmp_path, layerfuse=options, dtype="bfloat16", overrides=ONE_FP8) as engine,
    ):
        engine()
        with counting() as called:
            engine()
    assert not called["block_scaled_linear"]


def test_a_loaded_model_whose_adapter_reads_no_linears_is_fused_without_them(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an outside adapter may give norms: with how what reads them quantises, and not what that is."""
    read = registry.specs_in

    def without_linears(spec: Any) -> Any:
        changed: dict[str, Any] = {}
        for field in attrs.fields(type(spec)):
            held = getattr(spec, field.name)
            if field.name in ("consumers", "producers", "gives"):
                changed[field.name] = ()
            elif isinstance(held, NormSpec):
                changed[field.name] = without_linears(held)
            elif isinstance(held, tuple) and held and isinstance(held[0], NormSpec):
                changed[field.name] = tuple(map(without_linears, held))
        return attrs.evolve(spec, **changed)

    monkeypatch.setattr(registry, "specs_in", lambda model: [(at, without_linears(spec)) for at, spec in read(model)])
    options = {"fusions": f"{ADD}_group_quant,{BLOCKS}"}
    with (
        multiplying("CUTLASS"),
        started("deepseek-v3", tmp_path, layerfuse=options, dtype="bfloat16", overrides=ONE_FP8) as engine,
    ):
        engine()
    lines = said()
    assert told(f"{ADD}_group_quant", 1) in lines
    none = "has no site in DeepseekV3ForCausalLM: none of its layers has such a chain"
    assert f"layerfuse: {BLOCKS} is asked for, and {none}" in lines, "none is guessed"


LAYERS = "vllm.model_executor.layers.mamba"


@pytest.mark.parametrize(
    ("cls", "op"),
    [
        (f"{LAYERS}.short_conv:ShortConv", "short_conv"),
        (f"{LAYERS}.mamba_mixer:MambaMixer", "mamba_mixer"),
        (f"{LAYERS}.mamba_mixer2:MambaMixer2", None),
        ("vllm.model_executor.models.lfm2:Lfm2ShortConvDecoderLayer", None),
    ],
)
def test_a_linear_inside_of_an_op_of_vllms_is_in_no_graph(cls: str, op: str | None) -> None:
    module, _, name = cls.partition(":")
    made = getattr(importlib.import_module(module), name)
    layer = made.__new__(made)
    nn.Module.__init__(layer)
    layer.in_proj = nn.Linear(2, 2)
    why = None if op is None else f"vLLM calls it inside of its op {op}, which no graph shows"
    assert loading.why_hidden(nn.ModuleDict({"mixer": layer}), "mixer.in_proj") == why


def test_what_vllm_multiplies_by_a_kernel_for_few_tokens_stays_its_own(tmp_path: Path) -> None:
    """DeepSeek-V3's first projection in bfloat16, of which the tiny one has not the size."""
    with started("deepseek-v3", tmp_path, dtype="bfloat16") as engine:
        path = "model.layers.0.self_attn.fused_qkv_a_proj"
        assert loading.why_hidden(engine.model, path) is None
        linear = engine.model.get_submodule(path)
        assert linear._use_min_latency_gemm is False
        linear._use_min_latency_gemm = True
        why = "vLLM multiplies few tokens there by its own min_latency_fused_qkv_a_proj"
        assert loading.why_hidden(engine.model, path) == why


# ---- graphs


def given() -> dict[str, Tensor]:
    values, weight = torch.rand(6, 256).to(torch.float8_e4m3fn), torch.rand(384, 256).to(torch.float8_e4m3fn)
    return {"values": values, "scales": torch.rand(2, 6).t(), "weight": weight, "weight_scale": torch.rand(3, 2)}


def by_deep_gemm(values: Tensor, scales: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    out = torch.empty(len(values), len(weight), dtype=torch.bfloat16)
    op = torch.ops.vllm.fp8_gemm_nt_op.default
    named = dict(
        zip(("q_input", "input_scale", "weight", "weight_scale"), (values, scales, weight, weight_scale), strict=True)
    )
    return auto_functionalized(op, **named, output=out, use_deep_gemm_e8m0=True)[1]


def by_cutlass(
    values: Tensor, scales: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None
) -> Tensor:
    out = torch.empty(len(values), len(weight), dtype=torch.bfloat16)
    turned = {"b": weight.t(), "b_scales": weight_scale.t()}
    op = torch.ops._C.cutlass_scaled_mm.default
    return auto_functionalized(op, out=out, a=values, a_scales=scales, bias=bias, **turned)[1]


def graph_of(function: Any, **tensors: Tensor) -> Graph:
    """The graph of a call, by the names of its tensors."""
    names = list(tensors)
    return make_fx(lambda *each: function(**dict(zip(names, each, strict=True))), tracing_mode="fake")(
        *tensors.values()
    ).graph


def targets(graph: Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize(
    ("function", "beyond"),
    [
        (by_deep_gemm, "layerfuse_vllm::block_product_deep_gemm_rounded"),
        (by_cutlass, "layerfuse_vllm::block_product_cutlass"),
    ],
)
def test_a_product_becomes_one_op_that_knows_who_takes_more_tokens(function: Any, beyond: str) -> None:
    graph = graph_of(function, **given())
    everywhere(BLOCKS, graph)
    graph.lint()
    (node,) = (node for node in graph.nodes if node.target is inside.BLOCK_LINEAR)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    assert node.args == (*placeholders, torch.bfloat16, True, beyond)
    assert "auto_functionalized" not in targets(graph)
    assert not any("empty" in target for target in targets(graph))


@pytest.mark.parametrize("function", [by_deep_gemm, by_cutlass])
@pytest.mark.parametrize(
    "change",
    [
        {"scales": torch.ones(1, 6, dtype=torch.int32).t()},  # as DeepGEMM packs exponents on Blackwell
        {"scales": torch.rand(6, 1)},  # one for a token
        {"weight_scale": torch.rand(2, 3).t()},
        {"weight_scale": torch.rand(384, 1)},  # one for a column of the product
        {"weight_scale": torch.rand(3, 2).to(torch.bfloat16)},
        {"values": torch.rand(6, 512).to(torch.float8_e4m3fn)[:, ::2]},
    ],
    ids=lambda change: "-".join(f"{name}{tuple(each.shape)}{each.dtype}" for name, each in change.items()),
)
def test_scales_and_values_that_the_kernel_does_not_read_are_left_alone(
    function: Any, change: dict[str, Tensor]
) -> None:
    graph = graph_of(function, **(given() | change))
    before = targets(graph)
    everywhere(BLOCKS, graph)
    assert targets(graph) == before


def test_a_bias_or_a_weight_that_is_written_to_is_left_alone() -> None:
    def doubled(**each: Tensor) -> Tensor:
        return by_deep_gemm(
            **(each | {"weight": each["weight"].view(torch.uint8).bitwise_or(1).view(torch.float8_e4m3fn)})
        )

    for function, more in ((by_cutlass, {"bias": torch.rand(384).bfloat16()}), (doubled, {})):
        graph = graph_of(function, **(given() | more))
        before = targets(graph)
        everywhere(BLOCKS, graph)
        assert targets(graph) == before


def test_what_another_package_multiplies_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert products.why_not() is None
    monkeypatch.setattr(DEEP_GEMM, "fp8_gemm_nt", _deep_gemm)
    assert "fp8_gemm_nt is not vLLM's own: it is from test_vllm_inside" in (products.why_not() or "")


@pytest.mark.parametrize(("arch", "expected"), [("sm90", True), ("sm100", False), ("gfx950", False)])
def test_only_where_the_kernel_was_timed(arch: str, expected: bool) -> None:
    specs = list(registry.model("deepseek-v3").specs(published=True))
    for fusions, asked in (("none", False), ("all", expected), (f"{ADD}_group_quant", False)):
        made = plan(specs, Target.named(arch), FusionConfig.parse(fusions), Engine(name="vllm", linears={}))
        assert bool(made.expected(BLOCKS)) is asked
