"""Tiny cases, peers that are wrong on purpose, and a fusion of somebody else's."""

import attrs
import pytest
from bench_support import ANOTHER, OURS, peer_of, widths_for

from layerfuse import bench, registry
from layerfuse.bench.choosing import Options, make_case
from layerfuse.bench.plain_torch import EAGER_TORCH
from layerfuse.fusion import FUSIONS, backends, ops  # noqa: F401 (the backends register themselves with the ops)

TINY = {"device": "cpu", "quick": True, "tokens": [1, 5]}


@pytest.fixture(autouse=True)
def _the_reference_is_ours():
    """Triton's interpreter is on in the tests, and takes seconds for what is measured here."""
    backends.force("reference")
    yield
    backends.force(None)


@pytest.fixture
def case():
    def make(fusion="mla_dual_rms_norm", model=None, widths=None, **options):
        if widths is not None and fusion.startswith(("gated", "qk")):
            options.setdefault("heads", 2)
        return make_case(fusion, registry=registry.default, model=model, widths=widths, options=Options(**options))

    return make


@pytest.fixture
def tiny():
    """Run with our reference, `eager` and the copy, or others."""

    def run(fusion="mla_dual_rms_norm", names=(OURS, "eager", "copy"), **given):
        heads = {"heads": 2} if fusion.startswith(("gated", "qk")) and "model" not in given else {}
        return bench.run(fusion, peers=names, **{"widths": widths_for(fusion), **heads, **TINY, **given})

    return run


@pytest.fixture
def peer():
    """Registers `eager` with its results changed by a function, or another builder."""
    added = []

    def add_peer(change=None, *, build=None, name="broken"):
        def changed(work, setting):
            return [lambda call=call: change(*call()) for call in EAGER_TORCH.build(work, setting)]

        bench.register(peer_of(name, build or changed))
        added.append(name)

    yield add_peer
    for name in added:
        bench.unregister(name)


@pytest.fixture
def another():
    """A fusion in the catalog that no file of the house declares; other variants of it by what differs."""
    names = []

    def put(**changes):
        fusion = attrs.evolve(ANOTHER, **changes)
        FUSIONS._all()[fusion.name] = fusion
        names.append(fusion.name)
        return fusion

    yield put
    for name in names:
        del FUSIONS._all()[name]
