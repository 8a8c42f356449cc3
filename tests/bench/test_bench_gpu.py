"""The same on a GPU, where graphs are captured."""

import pytest
import torch

from layerfuse import bench
from layerfuse.bench.peers import EAGER
from layerfuse.fusion import backends

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

OPTIONS = {"widths": (256, 128, 16), "tokens": [1, 33], "quick": True, "device": "cuda"}


@pytest.fixture(autouse=True)
def _no_force():
    backends.force(None)


@pytest.mark.parametrize("op", bench.OPS)
def test_everybody_here_is_right_and_gets_a_time(op):
    result = bench.run(op, **OPTIONS)
    assert result.ours == "layerfuse (triton)"
    assert {"layerfuse (triton)", "layerfuse (reference)", "eager", "inductor", "copy"} <= set(result.present)
    for row in result.rows:
        assert {one.peer: (one.verdict, one.message) for one in row.measured} == dict.fromkeys(
            result.present, ("ok", "")
        )
        assert all(one.us > 0 for one in row.measured)
    assert {host.peer for host in result.host} == set(result.present) - {"copy"}


def test_a_peer_whose_graph_writes_nothing_is_seen(peer):
    def build(work, setting):
        once = [call() for call in EAGER.build(work, setting)]
        return [lambda results=results: results for results in once]

    peer(build=build)
    result = bench.run("mla_dual_rms_norm", peers=["broken", "copy"], **OPTIONS)
    for row in result.rows:
        assert row.of("broken").verdict == "wrong"
        assert row.of("copy").verdict == "ok"
