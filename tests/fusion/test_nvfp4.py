"""NVFP4: its arithmetic against float64, and its quantisation in compiled models, as our own op or as vLLM's, by its schema."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_ops import op
from family_support import E2M1, in_order, unpacked
from helpers import in_turn
from hypothesis import given, settings
from hypothesis import strategies as st
from quant_support import config
from stream_support import SITE, Layer, Stream, checked, exact_norm, form_of, rows, run, stream_spec
from torch import Tensor

from layerfuse import fusion
from layerfuse.fusion import ActivationQuant, ActivationQuantError, FusionConfigError, Target, ops
from layerfuse.fusion.ops.library import declared
from layerfuse.fusion.ops.quantisation import quantise_nvfp4, swizzle, unswizzled

SM100 = Target.named("sm100")
FACTOR = 400.0

# ---- arithmetic ------------------------------------------------------------------------------------------------------


def e4m3() -> Tensor:
    """Every finite magnitude of e4m3fn in float64, by what its bits mean."""
    bits = torch.arange(127)
    exponent, mantissa = bits >> 3, (bits & 7).double()
    return torch.where(exponent == 0, mantissa * 2.0**-9, torch.exp2(exponent.double() - 7) * (1 + mantissa / 8))


def nearest(values: Tensor, known: Tensor) -> Tensor:
    """The number of the nearest of a growing row of magnitudes, the even one of two; all in float64."""
    above = torch.searchsorted(known, values.contiguous()).clamp(max=len(known) - 1)
    below = (above - 1).clamp(min=0)
    low, high = values - known[below], known[above] - values
    tie_up = (low == high) & (above % 2 == 0)
    return torch.where((high < low) | tie_up, above, below)


def exact(values: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Codes with their signs (..., width) and bytes of scales (..., width / 16), each step in float64."""
    grouped = values.double().unflatten(-1, (-1, 16))
    amax = grouped.abs().amax(-1)
    scales = nearest((amax * factor / 6).clamp(max=448.0), e4m3())
    stands = e4m3()[scales] / factor
    scaled = torch.where(stands[..., None] > 0, grouped / stands[..., None].clamp(min=1e-300), 0.0)
    codes = nearest(scaled.abs().clamp(max=6.0), torch.tensor(E2M1, dtype=torch.float64))
    return (codes + 8 * grouped.signbit().long()).flatten(-2), scales


def codes_of(packed: Tensor) -> Tensor:
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()


def test_every_value_and_every_tie_of_e2m1() -> None:
    """With a largest of 6 and no factor the scale is 1: each of the values stands for itself, and between two goes the even one."""
    values = torch.tensor([*E2M1, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    x = torch.stack([values, -values, values.flip(0)])
    packed, scales = quantise_nvfp4(x, torch.tensor([1.0]), False)
    assert torch.equal(scales.float(), torch.ones(3, 1))
    ties = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    wanted = torch.tensor([*E2M1, *ties, 6.0], dtype=torch.float64)
    assert torch.equal(unpacked(packed), torch.stack([wanted, -wanted, wanted.flip(0)]))
    assert set(codes_of(packed).flatten().tolist()) == {*range(16)}, "every code, and minus zero keeps its sign"
    codes, bytes_ = exact(x, 1.0)
    assert torch.equal(codes_of(packed), codes) and torch.equal(scales.view(torch.uint8).long(), bytes_)


def test_every_scale_of_e4m3_and_every_tie_between_two() -> None:
    known = e4m3()
    amax = torch.cat([known, (known[1:] + known[:-1]) / 2, torch.tensor([1000.0])]) * 6
    x = torch.zeros(len(amax), 16)
    x[:, 3] = amax.float()
    _, scales = quantise_nvfp4(x, torch.tensor(1.0), False)
    assert torch.equal(scales.view(torch.uint8).long(), exact(x, 1.0)[1])
    assert float(scales[-1].float()) == 448.0


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(-20, 12),
    factor=st.sampled_from([2.0**-6, 1.0, 64.0, 512.0, 2.0**12]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_as_in_float64(seed: int, size: int, factor: float, dtype: torch.dtype) -> None:
    """Where a rounding in float32 may decide, the scale and the value are the nearest or the one beside it."""
    x = (torch.randn(4, 64, generator=torch.Generator().manual_seed(seed)) * 2.0**size).to(dtype)
    packed, scales = quantise_nvfp4(x, torch.tensor([factor]), False)
    codes, _ = exact(x, factor)
    edge = [exact(x.double() * (1 + slack), factor)[1] for slack in (-4e-7, 4e-7)]
    found = scales.view(torch.uint8).long()
    assert ((found == edge[0]) | (found == edge[1])).all()
    stands = (e4m3()[found] / factor).repeat_interleave(16, -1)
    off = (unpacked(packed) * stands - x.double()).abs() / stands.clamp(min=1e-300)
    magnitude = (x.double().abs() / stands.clamp(min=1e-300)).clamp(max=6.0)
    half = torch.where(magnitude < 2, 0.25, torch.where(magnitude < 4, 0.5, 1.0))
    beyond = (x.double().abs() / stands.clamp(min=1e-300) - 6).clamp(min=0)
    assert ((off <= half * (1 + 1e-5) + beyond) | (stands == 0)).all()
    assert not unpacked(packed)[stands == 0].any()
    assert torch.equal(codes_of(packed) >> 3, codes >> 3)


def test_nothing_broken_is_hidden() -> None:
    x = torch.ones(4, 32)
    x[0, 3], x[1, 20], x[2] = float("nan"), float("-inf"), 0.0
    packed, scales = quantise_nvfp4(x, torch.tensor([FACTOR]), False)
    assert scales.float().isnan().tolist() == [[True, False], [False, True], [False, False], [False, False]]
    assert not packed[2].any() and not scales[2].float().any()


@pytest.mark.parametrize(("count", "width"), [(1, 16), (5, 64), (128, 256), (130, 80), (0, 64)])
def test_scales_in_tiles(count: int, width: int) -> None:
    x, factor = torch.randn(count, width), torch.tensor(FACTOR)
    (packed, plain), (again, tiles) = quantise_nvfp4(x, factor, False), quantise_nvfp4(x, factor, True)
    columns = width // 16
    assert torch.equal(packed, again) and tiles.shape == (-(-count // 128) * 128, -(-columns // 4) * 4)
    bytes_ = plain.view(torch.uint8)
    assert torch.equal(in_order(tiles, count, columns).view(torch.uint8), bytes_)
    assert torch.equal(unswizzled(tiles, count, columns).view(torch.uint8), bytes_)
    assert tiles.view(torch.uint8).count_nonzero() == bytes_.count_nonzero(), "what is no scale is zero"
    assert torch.equal(swizzle(plain).view(torch.uint8), tiles.view(torch.uint8))


@pytest.mark.parametrize(
    ("dtype", "swizzled", "width"),
    in_turn([torch.bfloat16, torch.float16, torch.float32], [True, False], [16, 256]),
    ids=str,
)
def test_the_kernel_gives_every_bit_of_the_reference(dtype: torch.dtype, swizzled: bool, width: int) -> None:
    """Of rows whose norm is exact, as the root of their width is: of a hundred and thirty, so that there are two tiles, and of scales that are subnormal too."""
    signs = torch.randint(0, 2, (130, width), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    weight = torch.exp2(torch.arange(width).remainder(31) * -0.5)
    weight[0::16] = torch.tensor([6.0, 5.0, 2.5, 0.375]).repeat(width)[: width // 16]
    weight[16:32] *= 2.0**-12
    x = signs.to(dtype)
    pytest.importorskip("triton")
    from layerfuse.fusion.backends.triton.family import function_of

    args = (x, weight.to(dtype), 0.0, 0.0, torch.tensor([448.0]), swizzled)
    wanted = declared("rms_norm_nvfp4_quant").reference(*args)
    got = function_of(declared("rms_norm_nvfp4_quant"))(*args)
    for one, other in zip(got, wanted, strict=True):
        assert one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_what_is_refused_names_the_argument() -> None:
    x, weight, factor = torch.ones(2, 64), torch.ones(64), torch.tensor([1.0])
    with torch.no_grad():
        with pytest.raises(ValueError, match=r"rows of 40 columns are no multiple of 16"):
            ops.rms_norm_nvfp4_quant(torch.ones(2, 40), torch.ones(40), 1e-6, 0.0, factor)
        with pytest.raises(ValueError, match=r"global_scale must be one element of torch.float32, got \(2,\)"):
            ops.rms_norm_nvfp4_quant(x, weight, 1e-6, 0.0, torch.ones(2))
    with pytest.raises(ActivationQuantError, match="scales in tiles are those of a format"):
        ActivationQuant(swizzled=True)
    with pytest.raises(FusionConfigError, match=r"quant\['input'\]: the scales of mxfp4 do not lie in tiles"):
        config("mxfp4,swizzled")
    assert str(ActivationQuant.parse("nvfp4,swizzled")) == "nvfp4 with scales in tiles of 128 x 4"


# ---- in graphs -------------------------------------------------------------------------------------------------------


def buffers(x: Tensor, swizzled: bool, width: int | None = None) -> tuple[Tensor, Tensor]:
    """Uninitialised results as vLLM's `create_fp4_output_tensors` makes them."""
    count, width = x.shape[0], x.shape[-1] if width is None else width
    values = x.new_empty((count, width // 2), dtype=torch.uint8)
    if not swizzled:
        return values, x.new_empty((count, width // 16), dtype=torch.uint8)
    shape = ((count + 127) // 128 * 128, (width // 16 + 3) // 4 * 4 // 4)
    return values, x.new_empty(shape, dtype=torch.int32)


@op(
    "_C::scaled_fp4_quant(Tensor input, Tensor input_scale, bool is_sf_swizzled_layout) -> (Tensor, Tensor)",
    fake=lambda x, _, tiles: buffers(x, tiles),
)
def scaled_fp4_quant(x: Tensor, factor: Tensor, swizzled: bool) -> tuple[Tensor, Tensor]:
    values, scales = quantise_nvfp4(x, factor, swizzled)
    return values, scales.view(torch.int32 if swizzled else torch.uint8)


@op(
    "_C::scaled_fp4_quant.out(Tensor input, Tensor input_scale, bool is_sf_swizzled_layout, *, Tensor(a!) output, "
    "Tensor(b!) output_scale) -> ()"
)
def scaled_fp4_quant_out(x: Tensor, factor: Tensor, swizzled: bool, *, output: Tensor, output_scale: Tensor) -> None:
    padded = torch.nn.functional.pad(x, (0, 2 * output.shape[-1] - x.shape[-1]))
    for into, made in zip((output, output_scale), scaled_fp4_quant(padded, factor, swizzled), strict=True):
        into.copy_(made)


@op(
    "vllm::flashinfer_nvfp4_quantize(Tensor a, Tensor a_global_sf) -> (Tensor, Tensor)",
    fake=lambda x, _: buffers(x, False),
)
def flashinfer_nvfp4_quantize(x: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    return scaled_fp4_quant(x, factor, False)


class Stands(Stream):
    """A stream with the scale that a checkpoint gives, a buffer of no dimensions as vLLM's."""

    def __init__(self, quantise: Any, **more: Any) -> None:
        super().__init__(lambda normed: quantise(normed, self.factor), **more)
        self.register_buffer("factor", torch.tensor(FACTOR))


def ours(swizzled: bool) -> Any:
    return lambda x, factor: torch.ops.layerfuse.quantise_nvfp4(x, factor, swizzled)


def functional(swizzled: bool) -> Any:
    def quantise(x: Tensor, factor: Tensor) -> Any:
        values, scales = torch.ops._C.scaled_fp4_quant(x.reshape(-1, x.shape[-1]), factor, swizzled)
        return values, scales.view(torch.float8_e4m3fn)

    return quantise


def as_vllm(swizzled: bool, wider: int = 0) -> Any:
    """vllm/_custom_ops.py, `scaled_fp4_quant` of 0.33."""

    def quantise(x: Tensor, factor: Tensor) -> Any:
        x = x.reshape(-1, x.shape[-1])
        output, output_scale = buffers(x, swizzled, x.shape[-1] + wider)
        torch.ops._C.scaled_fp4_quant.out(x, factor, swizzled, output=output, output_scale=output_scale)
        return output, output_scale.view(torch.float8_e4m3fn)

    return quantise


FORMS = {"ours": ours, "functional": functional, "as vLLM": as_vllm}


@pytest.mark.parametrize(("form", "swizzled", "shape"), in_turn(FORMS, [True, False], [(5,), (2, 3), (130,)]), ids=str)
def test_the_stream(form: str, swizzled: bool, shape: tuple[int, ...]) -> None:
    module = Stands(FORMS[form](swizzled))
    x, residual = (torch.randn(*shape, 256).bfloat16() for _ in range(2))
    traced = run(module, "nvfp4,swizzled" if swizzled else "nvfp4", x, residual, target=SM100)
    verdict = traced.report.of("add_rms_norm_nvfp4_quant")
    assert verdict.matched == (SITE,) and verdict.executed == 1, str(traced.report)
    assert form_of(traced) == "add_rms_norm_nvfp4_quant"
    values, scales, total = traced.output
    assert torch.equal(total, x + residual)
    count = x.numel() // 256
    right = exact_norm(module, x, residual).view(count, 256)
    bytes_ = scales.view(torch.uint8)
    stored = in_order(bytes_, count, 16) if swizzled else bytes_.reshape(count, 16)
    stands = (e4m3()[stored.long()] / FACTOR).repeat_interleave(16, -1)
    off = (unpacked(values.reshape(count, 128)) * stands - right).abs()
    assert (off <= stands * 1.0 * (1 + 2**-3) + right.abs() * 2**-8).all()
    assert scales.dtype == torch.float8_e4m3fn


def test_a_router_keeps_the_norm() -> None:
    module = Stands(lambda normed, factor: (*as_vllm(True)(normed, factor), normed.exp()))
    traced = run(module, "nvfp4,swizzled", *rows(), target=SM100)
    assert form_of(traced) == "add_rms_norm_nvfp4_quant_with_norm", str(traced.report)


@pytest.mark.parametrize("quantise", [ours(True), as_vllm(True)], ids=["ours", "as vLLM"])
def test_compiled_for_good(quantise: Any) -> None:
    """Through Inductor, with any number of tokens: fused, and what no fusion took as it is."""
    module = Stands(quantise)
    for found, named in ((1, "nvfp4,swizzled"), (0, "mxfp4")):
        torch._dynamo.reset()
        model = Layer(module).requires_grad_(False)
        compiled = fusion.compile(
            model, specs=[("layer", stream_spec())], target=SM100, config=config(named), strict=False, dynamic=True
        )
        for count in (5, 130):
            x, residual = rows(count)
            with torch.no_grad():
                values, scales, _ = compiled(x, residual)
                wanted = module(x, residual)
            assert values.shape == wanted[0].shape and scales.shape == wanted[1].shape
            same = scales.view(torch.uint8) == wanted[1].view(torch.uint8)
            assert same.double().mean() > 0.95
        verdict = compiled.report.of(f"add_rms_norm_{named.partition(',')[0]}_quant")
        assert len(verdict.matched) == found, str(compiled.report)


def own_scale(normed: Tensor, _: Tensor) -> Any:
    return as_vllm(True)(normed, 2688 / normed.abs().max().float())


REFUSED = [
    ("nvfp4", ours(True), "the graph has the scales in tiles of 128 x 4, the plan row by row"),
    ("nvfp4,swizzled", as_vllm(False), "the graph has the scales row by row, the plan in tiles of 128 x 4"),
    ("mxfp4", ours(False), "the graph quantises to nvfp4, the plan says mxfp4"),
    ("nvfp4", lambda x, _: torch.ops.layerfuse.quantise_mxfp4(x), "the graph quantises to mxfp4, the plan says nvfp4"),
    ("nvfp4", torch.ops.vllm.flashinfer_nvfp4_quantize, "its scales lie in tiles of 8 x 4, and the fused op's of 128 x 4"),
    ("nvfp4,swizzled", as_vllm(True, wider=64), "and the fused op gives torch.uint8 (5, 128) row by row"),
    ("nvfp4,swizzled", own_scale, "comes from the values that are quantised"),
]  # fmt: skip


@pytest.mark.parametrize(("quant", "quantise", "reason"), REFUSED)
def test_left_alone(quant: str, quantise: Any, reason: str) -> None:
    traced = run(Stands(quantise), quant, *rows(), target=SM100, lower=checked)
    said = traced.report.of(f"add_rms_norm_{quant.partition(',')[0]}_quant").missed[SITE]
    assert reason in said
    assert form_of(traced) == "add_rms_norm"


def test_where_it_is_not() -> None:
    for name, width, reason in (
        ("sm90", 256, "sm90 has no NVFP4; NVIDIA's have it from sm100 on"),
        ("gfx950", 256, "gfx950 has no NVFP4"),
        ("sm100", 264, "264 wide, which is no multiple of the 16 columns that share a scale"),
    ):
        made = fusion.plan([stream_spec(width=width)], Target.named(name), config("nvfp4,swizzled"))
        (refused, *_) = made.refused("add_rms_norm_nvfp4_quant")
        assert reason in refused.reason
    (expected, *_) = fusion.plan([stream_spec()], SM100, config("nvfp4,swizzled")).expected("add_rms_norm_nvfp4_quant")
    assert "in nvfp4 with scales in tiles of 128 x 4" in expected.reason
