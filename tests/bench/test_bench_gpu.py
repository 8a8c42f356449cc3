"""The same on a GPU, where graphs are captured."""

import pytest
import torch
from bench_support import ALL, widths_for

from layerfuse import bench
from layerfuse.bench.plain_torch import EAGER_TORCH
from layerfuse.fusion import backends

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

OPTIONS = {"tokens": [1, 33], "quick": True, "device": "cuda"}


@pytest.fixture(autouse=True)
def _no_force():
    backends.force(None)


@pytest.mark.parametrize("fusion", ALL)
def test_everybody_here_is_right_and_gets_a_time(fusion):
    heads = {"heads": 2} if fusion.startswith("gated") else {}
    result = bench.run(fusion, widths=widths_for(fusion), **heads, **OPTIONS)
    assert result.ours == "layerfuse (triton)"
    assert {
        "layerfuse (triton)",
        "layerfuse (reference)",
        "eager",
        "inductor",
        "inductor combo_kernels",
        "copy",
    } <= set(result.present)
    for row in result.rows:
        assert {one.peer: (one.verdict, one.message) for one in row.measured} == dict.fromkeys(
            result.present, ("ok", "")
        )
        assert all(one.us > 0 for one in row.measured)
    assert {host.peer for host in result.host} == set(result.present) - {"copy"}


def test_a_peer_whose_graph_writes_nothing_is_seen(peer):
    def build(work, setting):
        once = [call() for call in EAGER_TORCH.build(work, setting)]
        return [lambda results=results: results for results in once]

    peer(build=build)
    result = bench.run("mla_dual_rms_norm", peers=["broken", "copy"], widths=(256, 128, 16), **OPTIONS)
    for row in result.rows:
        assert row.of("broken").verdict == "wrong"
        assert row.of("copy").verdict == "ok"


def test_a_peer_that_writes_over_its_inputs_is_checked_on_fresh_ones(peer):
    """Its graph repeats, and is right only after one pass."""

    def build(work, _setting):
        def call(x, residual):
            residual.add_(x)
            x.copy_(torch.nn.functional.rms_norm(residual, x.shape[-1:], work.weights["weight"], 1e-6))
            return x, residual

        return [bench.InPlace(call, rows) for rows in work.sets]

    peer(build=build, name="in place")
    result = bench.run("add_rms_norm", peers=["in place", "copy"], widths=(256,), **OPTIONS)
    for row in result.rows:
        assert {one.peer: (one.verdict, one.message) for one in row.measured} == dict.fromkeys(
            ("in place", "copy"), ("ok", "")
        )
