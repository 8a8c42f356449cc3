"""What AITER would answer wrongly is refused, in the releases in which it would; and only there."""

from __future__ import annotations

import pytest
import torch
from check_tools import EPSILON, FP8, installed, pair, random, same, same_quantised, weight
from norm_checks import check
from refusals import REFUSED, TAKEN
from standin import RELEASES, StandInMisuse, shared_standin
from test_bindings import refused

from layerfuse.fusion.backends import aiter as amd
from layerfuse.fusion.backends.aiter import AiterCallError, AiterUnavailableError, Call
from layerfuse.fusion.backends.aiter.calls import always
from layerfuse.fusion.backends.aiter.restrictions import RESTRICTIONS
from layerfuse.fusion.backends.aiter.silu_mul import halves
from layerfuse.fusion.backends.aiter.table import BY_NAME
from layerfuse.fusion.ops.arithmetic import silu_mul
from layerfuse.fusion.ops.norm import normalise, normalise_wide


@pytest.mark.parametrize("release", RELEASES)
def test_every_case_in_a_release(release):
    at = RELEASES.index(release)
    with installed(shared_standin(release)):
        for case in (*TAKEN, *REFUSED):
            if refused(case.binding, release):
                continue
            reason = amd.bound(case.binding).refuses(Call(**case.call))
            if any(RELEASES.index(first) <= at <= RELEASES.index(last) for first, last in case.releases):
                assert reason is not None, case
                assert case.words in reason
            else:
                assert reason is None, case


def test_every_restriction_has_a_case():
    """A row of the table that no call here meets would be a claim without a test."""
    unmet = [
        (r.bindings, r.kind, r.reason)
        for r in RESTRICTIONS
        if r.when is not always
        if not any(case.binding in r.bindings and r.when(Call(**{"fp8": FP8, **case.call})) for case in REFUSED)
    ]
    assert unmet == []


def test_nothing_follows_from_what_is_not_known():
    found = [r for r in RESTRICTIONS if r.when(Call())]
    assert [r.kind for r in found] == ["bytes", "norm"], "only what holds for every call may hold for an unknown one"


def test_check_raises_what_refuses_says():
    with installed(shared_standin("v0.1.20")):
        bound = amd.bound("mla_dual_rms_norm")
        bound.check(Call(dtype=torch.bfloat16))
        with pytest.raises(
            AiterCallError, match="aiter, mla_dual_rms_norm: its kernel takes float16 and bfloat16 only"
        ):
            bound.check(Call(dtype=torch.float32))


def test_bound_raises_where_bind_answers():
    name = "gated_rms_norm_per_token_quant"
    with installed(shared_standin("v0.1.17")):
        with pytest.raises(AiterUnavailableError, match=f"aiter, {name}: this build has no such function") as caught:
            amd.bound(name)
        assert caught.value.binding == name


# ---- the same calls made all the same: AITER fails, or is wrong without a word


def test_the_refused_is_really_wrong():
    x = random(4, 12288)
    with installed(shared_standin("v0.1.17")), pytest.raises(StandInMisuse, match="gemma_norm is silently dropped"):
        amd.bound("add_rms_norm").call(x, x, weight(12288), EPSILON, 1.0)
    with installed(shared_standin("v0.1.16.post3")):
        call = amd.bound("rms_norm_group_quant").call
        with pytest.raises(RuntimeError, match="group_size not support"):
            call(x[:, :5120], weight(5120), EPSILON, 0.0, FP8, 128, False, False, False)
    with installed(shared_standin("v0.1.19")):
        q, kv = pair(4)
        call = amd.bound("mla_dual_rms_norm_per_token_quant").call
        with pytest.raises(ValueError, match="fp8"):
            call(q, kv, weight(256), weight(128), EPSILON, EPSILON, 0.0, 0.0, torch.float8_e4m3fnuz, False)
        call = amd.bound("mla_dual_rms_norm_static_quant").call
        with pytest.raises(StandInMisuse, match="chosen by inp2 alone"):
            call(q, kv, weight(256), weight(128), EPSILON, EPSILON, 0.0, 0.0, torch.ones(1), FP8)
        call = amd.bound("silu_mul_group_quant").call
        with pytest.raises(StandInMisuse, match="other columns are reduced"):
            call(x[:, :6144], x[:, 6144:], float("inf"), FP8, 128, False, False, False)


# ---- what changes from call to call


def _misaligned(*shape: int) -> torch.Tensor:
    """Contiguous, but its rows start two bytes behind a multiple of 16."""
    whole = random(shape[0] * shape[1] + 1)
    return whole[1:].view(shape)


STRANGE = {
    "a base two bytes off": lambda: _misaligned(5, 256),
    "rows an odd number of elements apart": lambda: random(5, 257)[:, :256],
    "columns apart": lambda: random(5, 512)[:, ::2],
    "transposed": lambda: random(256, 5).t(),
    "one row over and over": lambda: random(1, 256).expand(5, 256),
    "one row, its stride of no meaning": lambda: random(3, 300)[:1].as_strided((1, 256), (1, 1)),
    "four dimensions, permuted": lambda: random(3, 2, 4, 256).permute(1, 2, 0, 3),
    "columns of four dimensions": lambda: random(2, 3, 4, 300)[..., 8:264],
}


@pytest.mark.parametrize("release", ["v0.1.16.post3", "v0.1.17", "v0.1.20"])
@pytest.mark.parametrize("strange", STRANGE)
def test_strange_strides_give_the_same_numbers(release, strange):
    x = STRANGE[strange]()
    kv = x[..., :128]
    strange_weight = torch.stack([weight(256), weight(256)], dim=1)[:, 0]
    with installed(shared_standin(release)):
        out, summed = amd.bound("add_rms_norm").call(x, x, strange_weight, EPSILON, 0.0)
        torch.testing.assert_close(summed, (x.float() * 2).to(x.dtype))
        torch.testing.assert_close(out, normalise_wide(x.float() * 2, weight(256).float(), EPSILON).to(x.dtype))
        for name in ("mla_dual_rms_norm", "mla_dual_rms_norm_group_quant"):
            quant = (FP8, 64, True, False, False) if name.endswith("quant") else ()
            *_, kv_out = amd.bound(name).call(x, kv, strange_weight, weight(128), EPSILON, 1e-6, 0.0, 0.0, *quant)
            torch.testing.assert_close(kv_out, normalise(kv, weight(128), 1e-6))


@pytest.mark.parametrize("strange", STRANGE)
def test_strange_strides_give_the_same_numbers_quantised(strange):
    x = STRANGE[strange]()
    strange_weight = torch.stack([weight(256), weight(256)], dim=1)[:, 0]
    wide = x.float() * 2
    normed = normalise_wide(wide, weight(256).float(), EPSILON)
    with installed(shared_standin("v0.1.20")):
        for name in BY_NAME:
            if name.startswith("add_rms_norm_group_quant"):
                out, scales, *_, summed = amd.bound(name).call(
                    x, x, strange_weight, EPSILON, 0.0, FP8, 64, True, False, False
                )
                same(summed, wide.to(x.dtype))
                same_quantised((out, scales), normed, 64, True)
        out, summed = amd.bound("add_rms_norm.triton").call(x, x, strange_weight, EPSILON, 0.0)
        same(out, normed.to(x.dtype))
        same(summed, wide.to(x.dtype))
        values, scales, summed = amd.bound("add_rms_norm_mxfp4_quant").call(x, x, strange_weight, EPSILON, 0.0)
        plain = x.clone(memory_format=torch.contiguous_format)
        expected = amd.bound("add_rms_norm_mxfp4_quant").call(plain, plain, weight(256), EPSILON, 0.0)
        assert all(map(torch.equal, (values, scales, summed), expected))


@pytest.mark.parametrize("strange", STRANGE)
def test_strange_halves_give_the_same_numbers(strange):
    x = STRANGE[strange]()
    for gate, up in ((x[..., :128], x[..., 128:]), (x[..., 128:], x[..., :128]), (x, x)):
        for name in ("silu_mul_group_quant", "silu_mul_group_quant.clamp", "silu_mul_group_quant.triton"):
            with installed(shared_standin("v0.1.20")):
                found = amd.bound(name).call(gate, up, float("inf"), FP8, 128, False, False, False)
                same_quantised(found, silu_mul(gate, up, float("inf")), 128)


def test_halves_of_one_tensor_are_not_copied():
    whole = random(4, 3, 512)
    found = halves(whole[..., :256], whole[..., 256:])
    assert found.data_ptr() == whole.data_ptr()
    assert found.shape == (12, 512)
    strided = random(4, 600)
    assert halves(strided[:, :256], strided[:, 256:512]).data_ptr() == strided.data_ptr()
    for gate, up in ((whole[..., 256:], whole[..., :256]), (whole[..., :128], whole[..., 256:384])):
        copied = halves(gate, up)
        assert torch.equal(copied, torch.cat((gate, up), dim=-1).flatten(0, -2))


@pytest.mark.parametrize("width", [12288, 8200])
@pytest.mark.parametrize("release", ["v0.1.16.post3", "v0.1.17", "v0.1.20"])
def test_wide_rows_take_the_generic_kernels(release, width):
    x = random(3, width + 8)[:, :width]
    with installed(shared_standin(release)):
        out, _ = amd.bound("add_rms_norm").call(x, x, weight(width), EPSILON, 0.0)
        expected = normalise_wide(x.float() * 2, weight(width).float(), EPSILON).to(x.dtype)
        torch.testing.assert_close(out, expected)


def test_float32_where_there_is_a_kernel_for_it():
    x = random(3, 264, dtype=torch.float32)[:, :256]
    by = weight(256).float()
    with installed(shared_standin("v0.1.20")):
        out, _ = amd.bound("add_rms_norm").call(x, x, by, EPSILON, 0.0)
        torch.testing.assert_close(out, normalise(x * 2, by, EPSILON))


def test_more_dimensions_cannot_reach_a_kernel_that_takes_the_width_from_dimension_1():
    with installed(shared_standin("v0.1.16.post6")):
        check(
            amd.bound("add_rms_norm").call, "add_rms_norm"
        )  # up to three dimensions; the stand-in fails on any but two


WRONG_CALLS = {
    "indices in int64": ("mla_metadata", lambda call: call(*[torch.zeros(2, dtype=torch.int64)] * 3, 16, 1, True, {}), "index tensors are int32"),
    "a page size that is no power of two": ("mla_metadata", lambda call: call(*[torch.zeros(2, dtype=torch.int32)] * 3, 16, 1, True, {}, page_size=3), "powers of two only"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG_CALLS)
def test_a_wrong_call_is_an_error_with_words(wrong):
    name, call, words = WRONG_CALLS[wrong]
    with (
        installed(shared_standin("v0.1.20")),
        pytest.raises(AiterCallError, match=words) as caught,
    ):
        call(amd.bound(name).call)
    assert caught.value.binding == name
