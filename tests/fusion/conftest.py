"""Fixtures of the fusion tests."""

from __future__ import annotations

import logging

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _quick() -> None:
    torch.set_num_threads(1)
    # pytest records every log; torch then renders its structured traces, which takes longer than the tests.
    logging.getLogger("torch.__trace").propagate = False
