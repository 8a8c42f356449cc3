"""Compiled Triton kernels are called directly in the releases whose call is known, and in no other."""

from __future__ import annotations

import inspect
import re
from contextlib import nullcontext
from threading import Thread
from unittest.mock import MagicMock

import pytest
import torch

triton = pytest.importorskip("triton")

from layerfuse.fusion import backends, ops  # noqa: E402
from layerfuse.fusion.backends.triton import launcher  # noqa: E402


@pytest.mark.parametrize("release", ["3.6.0", "3.7.1", "3.8.0", "3.9.0+git1234", "3.6.0+rocm7.2"])
def test_known_releases(release: str) -> None:
    assert launcher.is_known(release)


@pytest.mark.parametrize("release", ["3.5.1", "3.10.0", "3.60.0", "4.0.0", "unknown"])
def test_any_other_release_takes_its_own_launch(release: str) -> None:
    assert not launcher.is_known(release)


def test_the_release_that_is_here_calls_its_kernels_as_they_are_called_directly() -> None:
    """`again` gives what `JITFunction.run` gives, in its order, with None for metadata and hooks that nobody asked for."""
    source = re.sub(r"\s+", " ", inspect.getsource(triton.runtime.jit.JITFunction.run))
    call = (
        "kernel.run(grid_0, grid_1, grid_2, stream, kernel.function, kernel.packed_metadata, launch_metadata, "
        "knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, *bound_args.values())"
    )
    assert launcher.is_known(triton.__version__) == (call in source)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("known", [True, False])
def test_what_is_launched_gives_the_same(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[tuple[object, ...], launcher.Compiled] = {}
    monkeypatch.setattr(launcher, "_compiled", kept)
    monkeypatch.setattr(launcher, "_direct", known)
    x, residual = (torch.randn(5, 512, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight = torch.rand(512, device="cuda", dtype=torch.bfloat16)
    try:
        backends.force("reference")
        wanted = ops.add_rms_norm(x, residual, weight, 1e-6)
        backends.force("triton")
        for _ in range(3):
            for got, want in zip(ops.add_rms_norm(x, residual, weight, 1e-6), wanted, strict=True):
                torch.testing.assert_close(got, want, rtol=2**-7, atol=0)
    finally:
        backends.force(None)
    assert bool(kept) is known


GRID = {"rows": 2, "sides": 1, "warps": 4}


def test_what_is_compiled_ahead_is_not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[tuple[object, ...], launcher.Compiled] = {}
    monkeypatch.setattr(launcher, "_compiled", kept)
    monkeypatch.setattr(launcher, "interpreted", lambda _: False)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    kernel = MagicMock()
    rows = torch.ones(4, 8)
    other = MagicMock()
    with launcher.compiling_ahead() as ahead:
        launcher.first(kernel, ("key",), (rows,), (4, 8), (True,), rows=2, sides=1, warps=4)
        thread = Thread(target=launcher.first, args=(other, ("other",), (rows,), (4, 8), ()), kwargs=GRID)
        thread.start()
        thread.join()
    assert ahead
    other.__getitem__.assert_called_once()  # another thread launches meanwhile
    other.warmup.assert_not_called()
    kept.clear()
    kernel.warmup.assert_called_once_with(rows, 4, 8, True, False, grid=(2, 1, 1), num_warps=4)
    kernel.__getitem__.assert_not_called()
    assert not kept
    launcher.first(kernel, ("key",), (rows,), (4, 8), (True,), rows=2, sides=1, warps=4)
    kernel.__getitem__.assert_called_once_with((2, 1, 1))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_was_compiled_ahead_is_launched_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **said: compiled.append(said["repr"]))
    x, residual = (torch.randn(5, 1048, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight = torch.rand(1048, device="cuda", dtype=torch.bfloat16)
    try:
        backends.force("reference")
        wanted = ops.add_rms_norm(x, residual, weight, 1e-6)
        backends.force("triton")
        with launcher.compiling_ahead():
            ops.add_rms_norm(x, residual, weight, 1e-6)
        assert len(compiled) == 1
        for got, want in zip(ops.add_rms_norm(x, residual, weight, 1e-6), wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=2**-7, atol=0)
        assert len(compiled) == 1
    finally:
        backends.force(None)
