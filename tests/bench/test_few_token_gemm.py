"""`few_token_gemm` without a GPU: who enters, that results are held to float64, and what is added up."""

from __future__ import annotations

import json
import math
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from layerfuse.fusion import ops

SCRIPTS = Path(__file__).parents[2] / "bench" / "scripts"
BLOCKS = {
    "FlashInfer", "FlashInfer, quantisation in front", "DeepGEMM", "DeepGEMM, quantisation in front", "FlashInfer, bfloat16 in",
    "vLLM Marlin, bfloat16 in", "DeepGEMM, behind a norm", "FlashInfer, bfloat16 in, behind a norm", "a norm alone", "layerfuse",
    "layerfuse, bfloat16 in", "layerfuse, quantisation in front", "layerfuse, behind a norm",
}  # fmt: skip


@pytest.fixture
def gemm(monkeypatch):
    """The script, whose peers are plain torch and whose calls are timed by how many columns they give."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import few_token_gemm as script
    import few_token_peers as table

    class Graph:
        def __init__(self, calls, _repeats):
            self.calls, self.results = calls, [call() for call in calls]

        def start(self):
            pass

    def time_graphs(graphs, _rounds):
        from layerfuse.bench.timing import Timing

        return {
            name: Timing(us=us, low=us, high=us, rounds=1, calls=1)
            for name, graph in graphs.items()
            if (us := graph.results[0].numel() if isinstance(graph.results[0], torch.Tensor) else 1.0)
        }

    def product(x, scales, weight, weight_scales):
        return (script.dequantised(x, scales, 1) @ script.dequantised(weight, weight_scales, 128).t()).bfloat16()

    def inside(x, weight, weight_scales):
        return product(*script.quantised(x), weight, weight_scales)

    def weights_alone(x, weight, weight_scales):
        return (x.float() @ script.dequantised(weight, weight_scales, 128).t()).bfloat16()

    quantise = partial(ops.quantise_group, column_major=True, tma_aligned=True)
    norm = partial(torch.nn.functional.rms_norm, eps=table.EPSILON)

    def vllm_norm(x, weight):
        return norm(x, x.shape[1:], weight)

    blocks = {
        "FlashInfer": lambda: table.Peer(product, quantise),
        "DeepGEMM": lambda: table.Peer(product, quantise, behind_norm=lambda x, w: quantise(vllm_norm(x, w))),
        "FlashInfer, bfloat16 in": lambda: table.Peer(inside, behind_norm=lambda x, w: (vllm_norm(x, w),)),
        "vLLM Marlin, bfloat16 in": lambda: table.Peer(weights_alone),
    }
    ours = {name: made for name, made in table.PEERS["blocks"].items() if name.startswith("layerfuse")}
    for name, value in {
        "DEVICE": "cpu", "SHAPES": ((272, 384), (256, 256)), "PLACES": dict.fromkeys(table.PEERS, "0,1"), "MOST_CACHED": 300_000,
        "MOST_HELD": 300_000, "Graph": Graph, "time_graphs": time_graphs, "copy_speed": lambda: 1e6, "compile_at_once": lambda _: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(script, name, value)
    monkeypatch.setitem(table.PEERS, "blocks", blocks | ours)
    monkeypatch.setattr(table, "vllm_norm", vllm_norm)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    yield script
    for name in ("few_token_gemm", "few_token_peers", "workloads"):
        del sys.modules[name]


def ran(gemm, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["few_token_gemm.py", *arguments])
    return gemm.main()


def test_one_command_gives_the_sums_of_both_kinds_of_weights(gemm, monkeypatch, tmp_path, capsys):
    out = tmp_path / "table.json"
    assert ran(gemm, monkeypatch, "--table", "--tokens", "2,40", "--out", str(out)) == 0
    found = json.loads(out.read_text())
    for shape in ("272x384", "256x256"):
        few, many = (found["blocks"][shape]["entrants"][tokens] for tokens in ("2", "40"))
        assert few.keys() == BLOCKS and many.keys() == BLOCKS - {"layerfuse, bfloat16 in"}
        for name, row in (*few.items(), *many.items()):
            assert not row["problem"], (name, row)
            assert name == "a norm alone" or row["error"] < 0.01
    sums = found["blocks, all together"]
    assert sums["layerfuse"] == {"2": 2 * (272 + 256), "40": 40 * (272 + 256)}
    assert sums["layerfuse, behind a norm"] == {
        "2": 2 * (272 + 256) - 2 * (384 + 256),
        "40": 40 * (272 + 256) - 40 * (384 + 256),
    }
    assert sums["the fastest peer / layerfuse from bfloat16, as policy has it"] == {"2": 1.0, "40": 1.0}
    held = 272 * 384 + 3 * 3 * 4 + 256 * 256 + 2 * 2 * 4
    over = sums["layerfuse from fp8, as a fusion in front gives it / weights at the data sheet's speed"]
    assert over["2"] == pytest.approx(2 * (272 + 256) * 3.35e6 / held)
    assert found["bfloat16, all together"]["the fastest peer / layerfuse"] == {"2": 1.0, "40": 1.0}
    assert "blocks: 2 shapes together" in capsys.readouterr().out


def test_what_an_entrant_gives_wrong_is_not_added_up(gemm, monkeypatch, tmp_path):
    own = ops.block_scaled_linear
    monkeypatch.setattr(ops, "block_scaled_linear", lambda *given, **more: own(*given, **more) * 1.1)
    out = tmp_path / "table.json"
    assert ran(gemm, monkeypatch, "--table", "--tokens", "2", "--out", str(out)) == 1
    found = json.loads(out.read_text())
    assert found["blocks, all together"]["layerfuse"] == {"2": None}
    assert "off by 0.1" in found["blocks"]["272x384"]["entrants"]["2"]["layerfuse"]["problem"]


@pytest.mark.parametrize(("in_time", "shapes"), [(3, []), (4, ["272x384"])], ids=["before a shape", "in a shape"])
def test_where_nothing_is_timed_in_time_there_are_no_sums(gemm, monkeypatch, tmp_path, in_time, shapes):
    """`in_time`: how often the clock is read before the limit."""
    out, clock = tmp_path / "table.json", iter([0.0] * in_time)
    monkeypatch.setattr(gemm, "time", SimpleNamespace(monotonic=lambda: next(clock, 1.0)))
    assert ran(gemm, monkeypatch, "--table", "--tokens", "2", "--limit", "0", "--out", str(out)) == 0
    found = json.loads(out.read_text())
    assert [*found["blocks"]] == shapes
    assert found["blocks, all together"] == found["bfloat16, all together"] == {}


def test_marlin_is_held_to_the_activations_as_they_are(gemm, monkeypatch, tmp_path):
    """Its error would be that of the quantisation which it does not do."""
    monkeypatch.setattr(gemm, "WEIGHTS_ALONE", "nobody")
    out = tmp_path / "table.json"
    ran(gemm, monkeypatch, "--table", "--tokens", "2", "--out", str(out))
    row = json.loads(out.read_text())["blocks"]["272x384"]["entrants"]["2"]["vLLM Marlin, bfloat16 in"]
    assert row["error"] > 0.015 > gemm.MOST_ERROR / 2


@pytest.mark.parametrize("kind", ["bfloat16", "channels"])
def test_other_weights_are_multiplied_too(gemm, monkeypatch, tmp_path, kind):
    out = tmp_path / "table.json"
    assert ran(gemm, monkeypatch, f"--{kind}", "--tokens", "2,40", "--peers", "none", "--out", str(out)) == 0
    few, many = (json.loads(out.read_text())["shapes"]["272x384"]["entrants"][tokens] for tokens in ("2", "40"))
    ours = {"layerfuse"} if kind == "bfloat16" else {"layerfuse", "layerfuse, quantisation in front"}
    assert few.keys() == (ours | {"cuBLAS"} if kind == "bfloat16" else ours)
    assert many.keys() == ({"cuBLAS", "layerfuse"} if kind == "bfloat16" else set())
    assert all(row["error"] < 0.01 and not row["problem"] for row in few.values())


def test_everybody_is_called_once_where_it_is_only_compiled(gemm, monkeypatch, capsys):
    assert ran(gemm, monkeypatch, "--table", "--compile", "--tokens", "2") == 0
    assert not capsys.readouterr().out


def test_a_shape_without_a_time_leaves_no_sum(gemm):
    rows = {1: {"layerfuse": gemm.Row(2.0)}}
    named = gemm.summed({"a": rows, "b": {1: {"layerfuse": gemm.Row(problem="no memory")}}}, lambda name, _: True)
    assert math.isnan(named[1])
    assert gemm.summed({"a": rows, "b": rows}, lambda name, _: True) == {1: 4.0}


def test_torchs_product_has_weight_scales_in_rows_of_a_multiple_of_four(gemm, monkeypatch):
    monkeypatch.setattr(gemm.few_token_peers, "_vllm_quantised", lambda **_: None)
    weight, scales = gemm.drawn("blocks", 256, 18 * 128, "cpu")
    found, wide = gemm.few_token_peers.torch_blocks().load(weight, scales)
    assert found is weight and torch.equal(wide, scales) and wide.stride() == (20, 1)
