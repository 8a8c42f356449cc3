"""Tiny cases, and peers that are wrong on purpose."""

import pytest

from layerfuse import bench, registry
from layerfuse.bench import peers
from layerfuse.bench.cases import make_case
from layerfuse.fusion import backends, ops  # noqa: F401 (the backends register themselves with the ops)

TINY = {"widths": (256, 128, 16), "device": "cpu", "quick": True, "tokens": [1, 5]}


@pytest.fixture(autouse=True)
def _the_reference_is_ours():
    """Triton's interpreter is on in the tests, and takes seconds for what is measured here."""
    backends.force("reference")
    yield
    backends.force(None)


@pytest.fixture
def case():
    def make(op="mla_dual_rms_norm", **given):
        options = {
            "model": "deepseek-v3",
            "widths": None,
            "dtype": "bf16",
            "fp8": None,
            "group_size": None,
            "ue8m0": False,
        }
        return make_case(op, registry=registry.default, detected_fp8="e4m3fn", **{**options, **given})

    return make


@pytest.fixture
def tiny():
    """Run with our reference, `eager` and the copy, or others."""

    def run(op="mla_dual_rms_norm", names=("layerfuse (reference)", "eager", "copy"), **given):
        return bench.run(op, peers=names, **{**TINY, **given})

    return run


@pytest.fixture
def peer():
    """Registers `eager` with its results changed by a function, or another builder."""
    added = []

    def add(change=None, *, build=None, name="broken"):
        def changed(work, setting):
            return [lambda call=call: change(*call()) for call in peers.EAGER.build(work, setting)]

        bench.register(
            bench.Peer(
                name=name,
                about="a test's",
                why_not=lambda _: None,
                build=build or changed,
                rounds_between=True,
            )
        )
        added.append(name)

    yield add
    for name in added:
        bench.unregister(name)
