"""`mla_decode` in vLLM's real MLA wrapper and attention layer: the numbers and the cache of vLLM's own forward, step by step.

Run by `make test-engines` in an environment of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm_paged")
from test_vllm_plugin import fresh, said, written  # noqa: F401 (`fresh` is a fixture)
from torch import Tensor
from vllm_paged import paged
from vllm_started import loaded_from_cache

from layerfuse.fusion.backends import counting

ON = {"fusions": ["mla_decode"], "strict": True}
LINE = "mla_decode: 3 expected, 3 fused, 0 missed; called 3 times in the profiling run"
STEPS: tuple[tuple[tuple[tuple[int, int], ...], int], ...] = (
    (((0, 5),), 0),  # a prompt
    (((0, 1), (1, 7)), 0),  # decoding beside a prompt
    (((0, 1), (1, 1)), 0),  # nothing but decoding
    (((1, 1), (0, 1)), 6),  # the same, padded for a graph
    (((0, 1), (2, 3), (3, 2)), 3),  # two prompts, one of them a chunk, padded
    (((1, 1), (3, 4)), 0),  # the next chunk
    (((0, 1), (1, 1), (2, 1), (3, 1)), 1),
)
"""(sequence, new tokens) of each request, and rows of padding."""


def ran(
    name: str, path: Path, layerfuse: Any, **config: Any
) -> tuple[list[Tensor], list[dict[str, Tensor]], list[dict[str, int]]]:
    results, caches, calls = [], [], []
    with paged(name, path, layerfuse=layerfuse, **config) as engine:
        for requests, padded in STEPS:
            with counting() as counted:
                results.append(engine.step(requests, padded).float())
            caches.append(engine.bytes())
            calls.append(dict(counted))
    return results, caches, calls


@pytest.mark.parametrize("mode", ["VLLM_COMPILE", "NONE"])
@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
def test_every_step_gives_vllms_numbers_and_its_cache(
    cache_dtype: str, mode: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own, own_caches, none = ran("deepseek-v3", tmp_path / "own", False, cache_dtype=cache_dtype, mode=mode)
    assert not any(none)
    caplog.clear()
    got, caches, calls = ran("deepseek-v3", tmp_path / "ours", ON, cache_dtype=cache_dtype, mode=mode)
    assert LINE in said(caplog)
    for step, (a, b) in enumerate(zip(got, own, strict=True)):
        # An fp8 entry on the edge of two values may become the other one.
        close = {"rtol": 1e-2, "atol": 1e-2} if cache_dtype == "fp8" else {"rtol": 1e-4, "atol": 1e-4}
        torch.testing.assert_close(a, b, **close, msg=lambda m, s=step: f"step {s}: {m}")
    for found, expected in zip(caches, own_caches, strict=True):
        for name, held in found.items():
            wanted = expected[name]
            if cache_dtype == "fp8":
                a, b = (x.view(torch.float8_e4m3fn).float() for x in (held, wanted))
                torch.testing.assert_close(a, b, rtol=0.13, atol=2e-3, equal_nan=True)
                assert (held == wanted).float().mean() > 0.999
            else:
                torch.testing.assert_close(held.view(torch.float32), wanted.view(torch.float32), rtol=1e-4, atol=1e-5)
            # What no token has is as it was: not one byte is written elsewhere.
            guards = (wanted == 0xA5).view(-1, held.shape[-1]).all(-1)
            assert torch.equal((held == 0xA5).view(-1, held.shape[-1]).all(-1), guards)
    for (requests, _), counted in zip(STEPS, calls, strict=True):
        decodes = all(new == 1 for _, new in requests)
        concat = "mla_query_rope"
        assert counted["mla_norm_rope_cache_into"] == 3
        assert counted[concat] == 3, decodes


def test_a_start_from_vllms_cache_is_the_same(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The compiled model holds the ops by name, and finds the layers of the process that loads it."""
    results = []
    for start in ("cold", "warm"):
        caplog.clear()
        before = loaded_from_cache()
        results.append(ran("deepseek-v3", tmp_path, ON)[0])
        assert loaded_from_cache() - before == (start == "warm")
        assert LINE in said(caplog)
    assert all(torch.equal(*both) for both in zip(*results, strict=True))
