"""Fixtures of the fusion tests."""

from __future__ import annotations

import multiprocessing

import pytest
import torch

# What ranks need is imported once: each is a copy of a process that has done nothing else, and starts in a tenth of the time.
multiprocessing.set_forkserver_preload(
    [
        "torch._inductor.compile_fx",
        "torch.distributed.tensor.parallel",
        "transformers",
        "layerfuse.testing",
        "pytest",
    ]
)


@pytest.fixture
def _op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor runs its graphs op by op: the same graphs and calls without generated code, in a fraction of the time."""
    torch._dynamo.reset()
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", lambda gm, _inputs, **_: gm)


@pytest.fixture(autouse=True, scope="session")
def _quick() -> None:
    torch.set_num_threads(1)
