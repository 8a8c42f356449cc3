"""Fixtures of the fusion tests."""

from __future__ import annotations

import logging

import pytest
import torch


@pytest.fixture
def _op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor runs its graphs op by op: the same graphs and calls without generated code, in a fraction of the time."""
    torch._dynamo.reset()
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", lambda gm, _inputs, **_: gm)


@pytest.fixture(autouse=True, scope="session")
def _quick() -> None:
    torch.set_num_threads(1)
    # torch renders its structured traces, which takes longer than the tests, as long as their logger has a handler. pytest
    # from 9.2 on hands its own to every logger that does not propagate.
    traces = logging.getLogger("torch.__trace")
    traces.propagate = True
    traces.handlers.clear()
