"""Shared by the tests inside engines."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from layerfuse.engines import process

# Read when Inductor is first imported. Each engine compiles into a folder of its own, where preparing for many kernels takes longer than the one
# that is not left to torch.
os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")

if importlib.util.find_spec("vllm"):
    # For `run_copy`: vLLM takes ten seconds to import.
    multiprocessing.set_forkserver_preload(["vllm_host", "vllm.model_executor.models.deepseek_v2"])
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])


@pytest.fixture(autouse=True)
def environ() -> Iterator[None]:
    """vLLM sets a variable for models that it does not compile, and would not compile those of later tests."""
    with mock.patch.dict("os.environ"):
        yield


@pytest.fixture(autouse=True)
def unsaid() -> Iterator[None]:
    """What a process has logged once, each test hears again."""
    with mock.patch.object(process.this, "said", set()):
        yield
