"""A tiny benchmark from end to end, and that no wrong result gets a time."""

import json

import pytest
import torch
from bench_support import ALL, DUAL_QUANTS, OURS
from helpers import in_turn

from layerfuse import bench
from layerfuse.bench import check, report
from layerfuse.bench.plain_torch import EAGER_TORCH
from layerfuse.bench.result import Result

TAKES = {"ue8m0": ("group_quant", "token_quant"), "fp8": ("group_quant", "token_quant", "static_quant")}


def takes(fusion, option):
    return fusion.removesuffix("_with_norm").endswith(TAKES[option])


def more(option, value):
    """Each kind of quantisation once in a default run: chains differ in what stands in front of it."""
    seen = set()
    for fusion in filter(lambda name: takes(name, option), ALL):
        kind = next(kind for kind in TAKES[option] if kind in fusion)
        yield pytest.param(fusion, {option: value}, marks=pytest.mark.thorough if kind in seen else [])
        seen.add(kind)


MORE = [*more("ue8m0", True), *more("fp8", "e4m3fnuz")]


@pytest.mark.parametrize(("fusion", "options"), [*in_turn(ALL, [{}, {"dtype": "fp16"}, {"dtype": "fp32"}]), *MORE])
def test_everybody_here_is_right_and_gets_a_time(tiny, fusion, options):
    result = tiny(fusion, **options)
    assert result.present == (OURS, "eager", "copy")
    assert result.ours == OURS
    assert [row.tokens for row in result.rows] == [1, 5]
    for row in result.rows:
        assert {one.peer: (one.verdict, one.message) for one in row.measured} == dict.fromkeys(
            result.present, ("ok", "")
        )
        assert all(one.us > 0 and one.low <= one.us <= one.high and one.rounds >= 5 for one in row.measured)
        assert row.sets >= 8


def test_who_is_missing_says_why(tiny):
    result = tiny(names=[OURS, "layerfuse (aiter)", "copy"])
    missing = {peer.name: peer.why_not for peer in result.peers if not peer.present}
    assert missing["layerfuse (aiter)"] == "AITER's kernels run on AMD GPUs, not on cpu"
    assert missing["eager"] == "not asked for"
    said = list(report.remarks(result))
    assert "layerfuse (aiter) is missing: AITER's kernels run on AMD GPUs, not on cpu" in said
    assert not any(line.startswith("eager") for line in said)
    with pytest.raises(bench.CannotMeasureError, match="none of these peers can run here: layerfuse"):
        tiny(names=["layerfuse (aiter)"])


def test_a_result_goes_to_json_and_back(tiny):
    result = tiny(DUAL_QUANTS[0])
    text = json.dumps(result.to_dict(), allow_nan=False)
    assert Result.from_dict(json.loads(text)) == result


def test_a_result_of_an_older_format_says_so(tiny):
    with pytest.raises(bench.BenchError, match="this result has format 1, and format 3 is read; measure again"):
        Result.from_dict({**tiny(tokens=[1]).to_dict(), "format": 1})


def test_the_files_are_whole_and_nothing_else_is_left(tiny, tmp_path):
    result = tiny()
    written = bench.write(result, tmp_path / "new" / "folder")
    assert sorted(path.suffix for path in written) == [".json", ".md", ".svg"]
    assert sorted((tmp_path / "new" / "folder").iterdir()) == sorted(written)
    assert all(path.stem.startswith("mla_dual_rms_norm-q256-kv128-rope16-bf16-") for path in written)
    by_suffix = {path.suffix: path.read_text() for path in written}
    assert Result.from_dict(json.loads(by_suffix[".json"])) == result
    assert OURS in by_suffix[".svg"]
    for row in result.rows:
        cells = f"| {row.tokens} | {row.sets} | {row.us('copy'):.2f} |"
        assert cells in by_suffix[".md"]


def test_ratios_are_theirs_to_ours_and_ours_to_the_copy(tiny):
    result = tiny()
    ratios = report.tables(result)[1]
    row = result.rows[0]
    ours, eager, copy = (row.us(name) for name in (OURS, "eager", "copy"))
    assert ratios.head == ("tokens", "eager", "ours / copy")
    assert ratios.rows[0] == ("1", f"{eager / ours:.2f}", f"{ours / copy:.2f}")


# ---- wrong peers


def held_against(result):
    """The verdict and message on `broken`, the same at every number of tokens; nothing of it may be a time."""
    found = [row.of("broken") for row in result.rows]
    assert all(one.us is one.low is one.high is None for one in found)
    assert len({one.verdict for one in found}) == 1
    return found[-1].verdict, found[-1].message


def as_bytes(change):
    """Change an fp8 tensor through its bytes."""
    return lambda q, *rest: (change(q.clone().view(torch.uint8)).view(q.dtype), *rest)


def a_last_element(*results):
    results[-1][-1, -1] *= 1.05
    return results


def next_scale(scales):
    return (scales.view(torch.uint8) + 2).view(scales.dtype)


def pad_with_ones(x):
    return torch.cat([x[:, :-1], torch.ones_like(x[:, -1:])], -1)


A_STEP_TOO_SMALL = as_bytes(lambda q: q - ((q & 0x7F) > 0).byte())
WRONG = {
    "mla_dual_rms_norm": [
        (lambda q, kv: (q * 1.02, kv), "a norm is off by"),
        (a_last_element, "a norm is off by"),
        (lambda q, kv: (torch.zeros_like(q), kv), "a norm is off by"),
        (lambda q, kv: (q, torch.full_like(kv, float("nan"))), "a norm holds NaN"),
        (lambda q, kv: (kv, q), "results are bfloat16 (5, 128), bfloat16 (5, 256), expected"),
        (lambda q, kv: (q.float(), kv), "results are float32 (5, 256)"),
        (lambda q, kv: (q,), "results are bfloat16 (5, 256), expected"),
    ],
    **dict.fromkeys(
        DUAL_QUANTS,
        (
            (A_STEP_TOO_SMALL, "a quantised value is off by"),
            (as_bytes(lambda q: q.fill_(0x7F)), "a quantised value or a scale is NaN"),
            (lambda q, scales, kv: (q, scales * 1.05, kv), "a scale is off by"),
            (lambda q, scales, kv: (q, scales.flip(0), kv), "a scale is off by"),
            (lambda q, scales, kv: (q, scales, kv * 1.02), "a norm is off by"),
            (lambda q, scales, kv: (q.float(), scales, kv), "results are float32 (5, 256)"),
        ),
    ),
    "add_rms_norm": [
        (lambda normed, total: (normed * 1.02, total), "a norm is off by"),
        (lambda normed, total: (normed, total * 1.01), "a sum is off by"),
        (lambda normed, total: (normed, torch.full_like(total, float("nan"))), "a sum holds NaN"),
        (lambda normed, total: (total, normed), "is off by"),
    ],
    "rms_norm_static_quant": [(as_bytes(lambda q: q ^ 0x80), "half steps of fp8")],
    "rms_norm_mxfp8_quant": [
        (lambda q, e: (q, e + 1), "an exponent is not that of the largest of its values"),
        (A_STEP_TOO_SMALL, "half steps of fp8"),
    ],
    "rms_norm_mxfp4_quant": [(lambda q, e: ((q >> 4) | (q << 4), e), "half steps of fp4")],
    "rms_norm_nvfp4_quant": [
        (lambda q, e: ((q >> 4) | (q << 4), e), "half steps of fp4"),
        (lambda q, e: (q, next_scale(e)), "a scale is not that of the largest of its values"),
    ],
    "add_rms_norm_pad pad_to": [
        (lambda x, total: (pad_with_ones(x), total), "the padding is not zero"),
        (lambda x, total: (x[:, :256], total), "results are bfloat16 (5, 256)"),
    ],
    "rms_norm_group_quant_with_norm": [
        (lambda q, scales, normed: (q, scales, normed * 1.02), "a norm is off by"),
        (lambda q, scales, normed: (q, scales * 1.05, normed), "a scale is off by"),
    ],
    "gated_rms_norm": [(lambda normed: (normed.flip(1),), "a norm is off by")],
    "silu_mul_group_quant": [(lambda q, scales: (q.roll(1, 0), scales), "half steps of fp8")],
    "rms_norm_group_quant tma_aligned": [
        (lambda q, s: (q, s.t().contiguous().t()), "the scales (5, 2) have strides (1, 5), expected (1, 8)")
    ],
    "mla_dual_rms_norm_group_quant column_major": [
        (lambda q, s, kv: (q, s.contiguous(), kv), "the scales (5, 2) have strides (2, 1), expected (1, 5)")
    ],
    f"{DUAL_QUANTS[0]} ue8m0": [
        (lambda q, scales, kv: (q, scales * 0.9, kv), "a scale is not the power of two that it should be")
    ],
}
"""Fusion and option -> how a peer's results are changed, and what is said of them."""


@pytest.mark.parametrize(
    ("fusion", "change", "said"),
    [pytest.param(fusion, *each, id=f"{fusion}-{each[1]}") for fusion, several in WRONG.items() for each in several],
)
def test_a_wrong_result_gets_no_time(tiny, peer, fusion, change, said):
    peer(change)
    fusion, *options = fusion.split()
    more = {option: 300 if option == "pad_to" else True for option in options}
    verdict, message = held_against(tiny(fusion, names=["broken"], tokens=[5], **more))
    assert verdict == "wrong"
    assert said in message


def test_a_wrong_peer_stands_in_the_report_beside_the_times_of_others(tiny, peer):
    peer(lambda q, kv: (q * 1.02, kv))
    result = tiny(names=[OURS, "broken", "copy"])
    assert held_against(result)[0] == "wrong"
    assert result.rows[0].us(OURS) is not None
    assert report.tables(result)[0].rows[0][-1] == "wrong"
    for at in ("1 token", "5 tokens"):
        assert any(line.startswith(f"broken wrong at {at}: ") for line in report.remarks(result))
    bench.markdown(result)


def test_results_that_are_not_written_again_are_seen(tiny, peer):
    """What was right once is not enough: the second call hands out what the first one wrote."""

    def build(work, setting):
        once = [call() for call in EAGER_TORCH.build(work, setting)]
        return [lambda results=results: results for results in once]

    peer(build=build)
    verdict, message = held_against(tiny(names=["broken"]))
    assert (verdict, message[:17]) == ("wrong", "a norm holds NaN:")


def test_a_peer_that_raises_stops_nobody_else(tiny, peer):
    peer(lambda *_: 1 / 0)
    result = tiny(names=[OURS, "broken", "copy"])
    assert held_against(result) == ("failed", "ZeroDivisionError: division by zero")
    assert result.rows[0].us("copy") is not None


def test_a_copy_that_does_not_copy_is_wrong():
    there, source = torch.zeros(4, dtype=torch.uint8), torch.ones(4, dtype=torch.uint8)
    assert not check.check_copy((there, source)).ok
    assert check.check_copy((there.copy_(source), source)).ok
