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


@pytest.fixture(autouse=True, scope="session")
def _quick() -> None:
    torch.set_num_threads(1)
