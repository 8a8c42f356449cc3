"""Block fp8 linears as vLLM takes them where FlashInfer is installed: their quantisation stands inside of one op until a fusion takes it out.

FlashInfer's and DeepGEMM's kernels are plain torch here, behind vLLM's own op. Run by `make test-engines` in an environment of its own.
"""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("vllm_started")
from few_token_linears import BLOCKS, everywhere
from reports import Said, told
from test_vllm_plugin import ADD, DUAL, GROUP_FP8, ONE_FP8
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from vllm_layers import fp8_kernel
from vllm_started import BLOCK_FP8, apart, close, quantised_as_on_cuda, started

from layerfuse.adapters.linear_quant import quantiser_of
from layerfuse.engines.loading import NotFusedError
from layerfuse.engines.native import NotNativeError
from layerfuse.engines.vllm import inside, loading, products
from layerfuse.engines.vllm.readers import PRODUCT
from layerfuse.fusion import Target
from layerfuse.fusion.backends import counting
from layerfuse.fusion.ops.linear import MOST

KERNELS = importlib.import_module(inside.KERNELS)
DEEP_GEMM = importlib.import_module(inside.KERNELS.replace("flashinfer", "deep_gemm"))
OP = f"vllm.{inside.NAME}.default"
seen: list[tuple[str, torch.dtype, int]] = []
"""What the kernels were given: whose, in which dtype, how many tokens."""
rounded: set[bool] = set()
"""Whether the scales that came with values in fp8 were powers of two."""
laid: set[tuple[int, ...]] = set()
"""The strides of the scales that DeepGEMM was given."""


def _product(rows: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    scales = weight_scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: len(weight), : weight.shape[1]]
    return (rows @ (weight.float() * scales).T).bfloat16()


def _whole(values: Tensor, scales: Tensor) -> Tensor:
    rounded.add(bool((torch.frexp(scales).mantissa == 0.5).all()))
    assert scales.stride() == (1, -(-len(values) // 4) * 4), "column by column, each on 16 bytes"
    return values.float() * scales.repeat_interleave(128, -1)[:, : values.shape[-1]]


def _flashinfer(
    input: Tensor,  # noqa: A002 (named as the kernel names it)
    weight: Tensor,
    weight_scale: Tensor,
    input_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    seen.append(("FlashInfer", input.dtype, len(input)))
    assert out_dtype == torch.bfloat16
    if input_scale is None:
        values, scales = torch.ops.layerfuse.quantise_group(input, torch.float8_e4m3fn, 128, True, True, False)
        return _product(values.float() * scales.repeat_interleave(128, -1)[:, : values.shape[-1]], weight, weight_scale)
    return _product(_whole(input, input_scale), weight, weight_scale)


def _deep_gemm(
    rows: tuple[Tensor, Tensor], weight: tuple[Tensor, Tensor], out: Tensor, *, is_deep_gemm_e8m0_used: bool
) -> None:
    seen.append(("DeepGEMM", rows[0].dtype, len(out)))
    laid.add(rows[1].stride())
    assert is_deep_gemm_e8m0_used == DEEP_GEMM.is_deep_gemm_e8m0_used()
    out.copy_(_product(rows[0].float() * rows[1].repeat_interleave(128, -1)[:, : rows[0].shape[-1]], *weight))


WAYS = {
    "FlashInfer": "flashinfer:FlashInferFp8DeepGEMMDynamicBlockScaledKernel",
    "DeepGEMM": "deep_gemm:DeepGemmFp8BlockScaledMMKernel",
    "CUTLASS": "cutlass:CutlassFp8BlockScaledMMKernel",
}


@contextlib.contextmanager
def multiplying(way: str, powers_of_two: bool = False) -> Iterator[None]:
    """vLLM's fp8 linears by one of these, as on Hopper, but for FlashInfer's kernel and DeepGEMM's."""
    with (
        mock.patch.object(DEEP_GEMM, "is_deep_gemm_e8m0_used", return_value=powers_of_two),
        fp8_kernel(WAYS[way]),
        quantised_as_on_cuda(),
        mock.patch.object(KERNELS, "flashinfer_fp8_blockscale_gemm", _flashinfer),
        mock.patch.object(KERNELS, "fp8_gemm_nt", _deep_gemm),
        mock.patch.object(DEEP_GEMM, "fp8_gemm_nt", _deep_gemm),
        mock.patch.object(inside, "native_function"),  # which would find them
        mock.patch.object(products, "native_function"),
        mock.patch.object(loading, "target_of", return_value=Target(arch="cpu", vendor="cpu", fp8="e4m3fn")),
    ):
        yield


def as_installed(powers_of_two: bool = False) -> Any:
    """As vLLM has them on Hopper beside FlashInfer."""
    return multiplying("FlashInfer", powers_of_two)


FUSED = 2 + 2 + 1 + 1 + 1
"""Linears behind adds with norms, latent norms, the first norm, products, and the product of shared experts."""
UNFUSED = 2 + 1
"""Behind attention, and what shared experts read."""
MANY = FUSED + UNFUSED


@pytest.mark.parametrize("powers_of_two", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_named_fusion_takes_the_quantisation_out_and_layerfuse_multiplies_few_tokens(
    tmp_path: Path, said: Said, powers_of_two: bool
) -> None:
    options = {"fusions": "all", "strict": True}
    with (
        as_installed(powers_of_two),
        started("deepseek-v3", tmp_path, layerfuse=options, dtype="bfloat16", overrides=GROUP_FP8) as engine,
    ):
        engine()  # compiles
        for tokens in (6, 16, 17, 31, 32, 33):
            seen.clear()
            rounded.clear()
            with counting() as called:
                fused, mine = engine(tokens), seen.copy()
            assert rounded <= {powers_of_two}, "scales are those of DeepGEMM's quantisation"
            seen.clear()
            with as_vllm_has_them(engine.model):
                plain, theirs = engine.uncompiled(tokens), seen.copy()
            assert close(fused, plain)
            assert theirs == [("FlashInfer" if tokens < 32 else "DeepGEMM", *how) for _, *how in theirs]
            assert len(theirs) == FUSED + UNFUSED
            assert called["block_scaled_linear"] == FUSED and called["group_quant_linear"] == UNFUSED
            inside_of, behind = [("FlashInfer", torch.bfloat16), ("FlashInfer", torch.float8_e4m3fn)] if tokens < 32 else [
                ("DeepGEMM", torch.float8_e4m3fn)
            ] * 2  # fmt: skip
            wanted = [inside_of] * UNFUSED + [behind] * FUSED if tokens > MOST else []
            assert sorted((whose, str(dtype)) for whose, dtype, many in mine if many == tokens) == sorted(
                (whose, str(dtype)) for whose, dtype in wanted
            )
    assert {line.partition(";")[0] for line in said() if "expected" in line} >= {
        f"{ADD}_group_quant: 2 expected, 2 fused, 0 missed",
        f"{DUAL}_group_quant: 2 expected, 2 fused, 0 missed",
        "silu_mul_group_quant: 1 expected, 1 fused, 0 missed",
    }
    assert told(BLOCKS, MANY) in said()


@contextlib.contextmanager
def as_vllm_has_them(model: torch.nn.Module) -> Iterator[None]:
    """Without what stands in shared experts."""
    shared = [each for path, each in model.named_modules() if path.endswith("shared_experts")]
    held = [
        vars(owner)
        for around in shared
        for each in around.modules()
        for owner in (each, quantiser_of(each))
        if owner is not None
    ]
    taken = [(where, name, where.pop(name)) for where in held for name in ("forward", PRODUCT) if name in where]
    try:
        yield
    finally:
        for where, name, what in taken:
            where[name] = what


def test_a_plan_says_whose_code_keeps_a_quantisation_inside(tmp_path: Path) -> None:
    options = {"fusions": f"{ADD}_group_quant", "strict": True}
    foreign = NotNativeError(f"{inside.KERNELS}:fp8_gemm_nt", "another_package")
    with (
        as_installed(),
        mock.patch.object(inside, "native_function", side_effect=foreign),
        pytest.raises(NotFusedError, match=re.escape(f"nothing takes that out in vllm: {foreign}")),
        started("deepseek-v3", tmp_path, layerfuse=options, dtype="bfloat16", overrides=BLOCK_FP8),
    ):
        pass


def test_without_a_name_nothing_is_taken_out(tmp_path: Path) -> None:
    with (
        as_installed(),
        started(
            "deepseek-v3", tmp_path, layerfuse={"fusions": f"+{ADD}"}, dtype="bfloat16", overrides=ONE_FP8
        ) as engine,
    ):
        engine()
        seen.clear()
        engine()
    assert {dtype for _, dtype, _ in seen} == {torch.bfloat16}
    text = " ".join(path.read_text() for path in tmp_path.rglob("layerfuse-report.json"))
    assert "it was measured faster on sm90, where linears quantise inside of their op" in text


def test_what_is_put_back_reads_what_a_fusion_without_quantisation_gives(tmp_path: Path, said: Said) -> None:
    options = {"fusions": f"+{DUAL}_group_quant,+{ADD}", "strict": True}
    with (
        as_installed(),
        started("deepseek-v3", tmp_path, layerfuse=options, dtype="bfloat16", overrides=ONE_FP8) as engine,
    ):
        engine()
        assert close(engine(6), engine.uncompiled(6))
    assert {line.partition(";")[0] for line in said() if "expected" in line} >= {
        f"{ADD}: 2 expected, 2 fused, 0 missed",
        f"{DUAL}_group_quant: 1 expected, 1 fused, 0 missed",
    }


def test_zero_centred_norms_whose_weights_are_float32_in_the_graph(tmp_path: Path, said: Said) -> None:
    """Qwen3.5 in fp8: vLLM's own pass fuses none of its norms (vLLM#45770)."""
    options = {"fusions": "all", "strict": True}
    fp8 = {"quantization_config": BLOCK_FP8["quantization_config"]}
    with (
        as_installed(True),
        started("qwen3.5-27b", tmp_path, layerfuse=options, dtype="bfloat16", overrides=fp8) as engine,
    ):
        engine()
        assert apart(engine(40), engine.uncompiled(40)) < 0.05  # one rounding to e4m3 is up to 0.06 of a number
    assert {line.partition(";")[0] for line in said() if "expected" in line} == {
        f"{ADD}_group_quant: 7 expected, 7 fused, 0 missed",
        f"{ADD}: 1 expected, 1 fused, 0 missed",
        "rms_norm_group_quant: 1 expected, 1 fused, 0 missed",
        "silu_mul_group_quant: 4 expected, 4 fused, 0 missed",
        "gated_rms_norm: 3 expected, 3 fused, 0 missed",
        "qk_norm_rope: 1 expected, 1 fused, 0 missed",
        f"{BLOCKS}: 16 expected, 16 fused, 0 missed",
    }
    assert "3 linears that no spec lists are layerfuse's for few tokens too" in said()


def test_what_no_fusion_takes_is_put_back_for_more_than_few_tokens() -> None:
    x, weight, scales = torch.rand(6, 256).bfloat16(), torch.rand(384, 256).to(torch.float8_e4m3fn), torch.rand(3, 2)

    def four(x: Tensor, weight: Tensor, scales: Tensor) -> list[Tensor]:
        op = getattr(torch.ops.vllm, inside.NAME)
        return [op(x, weight, scales, *how) for how in ((128, False), (128, False), (128, True), (64, False))]

    graph = make_fx(four, tracing_mode="fake")(x, weight, scales).graph
    before = [(str(node.target), tuple(map(str, node.args[3:]))) for node in graph.nodes]
    taken = inside.TakenOut(graph)
    targets = [str(node.target) for node in graph.nodes]
    assert targets.count("layerfuse.quantise_group.default") == 2, (
        "of one tensor once, and once more where scales are powers of two"
    )
    assert targets.count("layerfuse_vllm.block_product.default") == 3
    assert targets.count(OP) == 1, "other groups are left to vLLM"
    graph.lint()
    everywhere(BLOCKS, graph)
    taken.put_back()
    graph.lint()
    names = {False: "layerfuse_vllm::block_linear_exact", True: "layerfuse_vllm::block_linear_rounded"}
    after = [(str(node.target), tuple(map(str, node.args[3:]))) for node in graph.nodes]
    ours = [
        ("layerfuse.group_quant_linear.default", ("False", "True", names[rounds])) for rounds in (False, False, True)
    ]
    assert [each for each in after if each in ours] == ours
    assert [each for each in after if each not in ours] == [each for each in before if each[1][:1] != ("128",)]


def test_scales_that_lie_otherwise_leave_a_product_as_it_was() -> None:
    x, weight, scales = (
        torch.rand(6, 256).bfloat16(),
        torch.rand(384, 256).to(torch.float8_e4m3fn),
        torch.rand(2, 3).t(),
    )
    op = getattr(torch.ops.vllm, inside.NAME)
    graph = make_fx(lambda *given: op(*given, 128, False), tracing_mode="fake")(x, weight, scales).graph
    before = [str(node.target) for node in graph.nodes]
    taken = inside.TakenOut(graph)
    assert everywhere(BLOCKS, graph) == ()
    taken.put_back()
    assert [str(node.target) for node in graph.nodes] == before


def test_few_tokens_of_a_weight_that_is_vllms_go_to_flashinfer_as_the_fusion_has_quantised_them(tmp_path: Path) -> None:
    with (
        mock.patch.object(inside, "LARGE_BLOCKS", 0),
        as_installed(),
        started("deepseek-v3", tmp_path, layerfuse={"fusions": "all"}, dtype="bfloat16", overrides=GROUP_FP8) as engine,
    ):
        engine()
        for tokens, whose in ((6, "FlashInfer"), (31, "FlashInfer"), (32, "DeepGEMM")):
            seen.clear()
            fused, mine = engine(tokens), seen.copy()
            assert mine.count((whose, torch.float8_e4m3fn, tokens)) >= FUSED - 1, "shared experts are not in the graph"
            with as_vllm_has_them(engine.model):
                assert close(fused, engine.uncompiled(tokens))


@pytest.mark.parametrize(("columns", "layerfuses"), [(76 * 128, True), (77 * 128, False)])
def test_a_large_weight_is_vllms_where_no_plan_says_so(columns: int, layerfuses: bool) -> None:
    """Of linears that no spec lists: 69.7 and 70.6 million numbers."""
    weight = torch.empty(7168, columns, dtype=torch.float8_e4m3fn, device="meta")
    assert inside.is_layerfuses(weight, torch.empty(56, columns // 128, device="meta")) is layerfuses


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fnuz, torch.float8_e5m2, torch.int8, torch.bfloat16])
def test_a_weight_of_another_format_is_vllms(dtype: torch.dtype) -> None:
    assert not inside.is_layerfuses(torch.empty(256, 256, dtype=dtype), torch.empty(2, 2))


def test_scales_and_what_is_multiplied_are_of_the_dtypes_that_kernels_read() -> None:
    weight, scales = torch.empty(256, 256, dtype=torch.float8_e4m3fn), torch.empty(2, 2)
    for dtype, layerfuses in ((torch.bfloat16, True), (torch.float16, False), (torch.float32, False)):
        assert inside.is_layerfuses(weight, scales, torch.empty(4, 256, dtype=dtype)) is layerfuses
        assert not inside.is_layerfuses(weight, scales.to(torch.bfloat16), torch.empty(4, 256, dtype=dtype))


def test_the_op_is_vllms_own_or_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert inside.why_not() is None
    for name in ("fp8_gemm_nt", "flashinfer_fp8_blockscale_gemm"):
        with mock.patch.object(KERNELS, name, _deep_gemm):
            assert re.search(rf"{name} .*not vLLM's own: it is from test_vllm_inside", inside.why_not() or "")
    with mock.patch.object(KERNELS, f"_{inside.NAME}_impl", lambda x, w: x @ w):
        assert inside.why_not() == f"{inside.NAME} takes x, w, and not {', '.join(inside.ARGUMENTS)}"
    with mock.patch.object(KERNELS.envs, "VLLM_BATCH_INVARIANT", True):
        assert inside.why_not() == "VLLM_BATCH_INVARIANT multiplies by DeepGEMM at every size"
    for name in ("flashinfer_fp8_blockscale_gemm", f"_{inside.NAME}_impl"):
        monkeypatch.delattr(KERNELS, name)
        assert re.search(rf"as it is known: .*{name}", inside.why_not() or "")
