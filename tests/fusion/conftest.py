"""Fixtures of the fusion tests."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _quick() -> None:
    torch.set_num_threads(1)
