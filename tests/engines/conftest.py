"""Shared by the tests inside engines."""

from __future__ import annotations

import importlib.util
import logging
import multiprocessing
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock
from weakref import ref

import pytest
from helpers import backend_at_hand
from reports import Said
from torch import Tensor

from layerfuse.engines import process, shadowing
from layerfuse.engines.vllm import plugin
from layerfuse.fusion import backends
from layerfuse.fusion.ops.library import declared

# Read when Inductor is first imported. Each engine compiles into a folder of its own, where preparing for many kernels takes longer than the one
# that is not left to torch.
os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")

IN_VLLM = importlib.util.find_spec("vllm") is not None
if IN_VLLM:
    # For `run_copy`: vLLM takes ten seconds to import.
    multiprocessing.set_forkserver_preload(["vllm_host", "vllm.model_executor.models.deepseek_v2"])
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])


@pytest.fixture(autouse=True)
def environ() -> Iterator[None]:
    """vLLM sets a variable for models that it does not compile, and would not compile those of later tests."""
    with mock.patch.dict("os.environ"):
        yield


if IN_VLLM:

    @pytest.fixture(autouse=True)
    def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
        """As in a new process: nothing asked for, said, or waited for, vLLM's hooks in their places, and no model compared that is still held."""
        around_calls, left = shadowing._around_calls, list[Any]()

        def kept(*given: Any) -> Callable[[], None]:
            leave = around_calls(*given)
            left.append(ref(leave))  # which holds the module
            return leave

        monkeypatch.setattr(shadowing, "_around_calls", kept)
        monkeypatch.setattr(process, "this", process.Process())
        monkeypatch.delenv("LAYERFUSE_FUSIONS", raising=False)
        monkeypatch.setenv(
            "TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor")
        )  # vLLM sets it; what it was comes back
        plugin.register()
        yield
        for leave in filter(None, (each() for each in reversed(left))):
            leave()

elif importlib.util.find_spec("sglang"):
    from sglang_fixtures import fresh, kernels  # noqa: F401


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Said:
    """What layerfuse logs."""
    engine = "vllm" if IN_VLLM else "sglang"
    caplog.set_level(logging.INFO, logger=f"{engine}.layerfuse")
    return Said(caplog, engine)


@pytest.fixture
def standing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Puts a kernel that gives so many times what it should in front of all others, for an op and the weights that a function picks."""

    def stand(op: str, factor: float, at: Callable[..., bool] = lambda *_: True) -> None:
        def kernel(*given: Any) -> Any:
            results = declared(op).reference(*given)
            if factor == 1 or not at(*given):
                return results
            return results * factor if isinstance(results, Tensor) else (results[0] * factor, *results[1:])

        monkeypatch.setitem(backends._backends, op, [backend_at_hand(op, kernel), *backends._backends[op]])
        backends.decide_again()

    yield stand
    monkeypatch.undo()
    backends.decide_again()
