"""layerfuse inside vLLM: real models in vLLM's own compiler on CPU torch, started cold and from vLLM's cache.

Run by `make test-engines` in an environment of its own.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm_started")
from vllm_started import loaded_from_cache, started

from layerfuse.engines.vllm import plugin

DUAL, ADD = "mla_dual_rms_norm", "add_rms_norm"
BOTH = {"fusions": [DUAL, ADD]}


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """As in a new process: nothing said, nothing waited for, the hooks in their places."""
    monkeypatch.setattr(plugin, "_state", plugin._State())
    monkeypatch.delenv("LAYERFUSE_FUSIONS", raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "unused")  # vLLM sets it; what it was comes back
    caplog.set_level(logging.INFO, logger="vllm.layerfuse")
    plugin.register()


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What layerfuse has logged, line by line."""
    messages = [record.getMessage() for record in caplog.records if record.name == "vllm.layerfuse"]
    return [line.strip() for message in messages for line in message.splitlines()]


def written(cache: Path) -> dict[str, Any]:
    """The module of the one report below a cache."""
    (path,) = cache.rglob("layerfuse-report.json")
    (module,) = json.loads(path.read_text())["modules"].values()
    return module


def outcomes(module: dict[str, Any]) -> Counter[tuple[str, str]]:
    return Counter((row["fusion"], row["outcome"]) for row in module["sites"] if row["decision"] == "expected")


@pytest.mark.parametrize("split", [True, False], ids=["split at attention", "whole"])
def test_every_site_is_fused_called_and_reported_cold_and_warm(
    split: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    results = []
    for start in ("cold", "warm"):
        caplog.clear()
        before = loaded_from_cache()
        with started("deepseek-v3", tmp_path, layerfuse={**BOTH, "strict": True}, split=split) as engine:
            results.append(engine())
            assert loaded_from_cache() - before == (start == "warm")
            torch.testing.assert_close(results[-1], engine.uncompiled(), rtol=1e-4, atol=1e-4)

        lines = said(caplog)
        assert f"{ADD}: 6 expected, 6 fused, 0 missed; called 6 times in the profiling run" in lines
        assert f"{DUAL}: 3 expected, 3 fused, 0 missed; called 3 times in the profiling run" in lines
        assert any("the report that was kept" in line for line in lines) == (start == "warm")
        # Layers 1 and 2 differ in nothing but their names: the piece between their attentions is compiled once.
        assert ("1 graphs are equal to others, and were compiled with them" in lines) == (split and start == "cold")
        module = written(tmp_path)
        assert outcomes(module) == {(ADD, "fused"): 6, (DUAL, "fused"): 3}
        assert (module["kept_since"] is not None) == (start == "warm")
    assert torch.equal(*results)


def test_off_by_default_nothing_is_planned_and_vllm_compiles_as_ever(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with started("deepseek-v3", tmp_path) as engine:
        engine()
        assert engine.config.additional_config == {}
    assert said(caplog) == [
        "layerfuse: no fusion is on in vLLM by default; see docs/vllm.md for those that can be",
    ]
    assert not list(tmp_path.rglob("*layerfuse*"))


def test_what_is_asked_for_is_part_of_vllms_cache_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled model with other fusions, or with none, must never be served."""
    hashes = set()
    for options in (None, {"fusions": DUAL}, BOTH, "environment"):
        monkeypatch.setenv("LAYERFUSE_FUSIONS", f"-{ADD}" if options == "environment" else "")
        with started("deepseek-v3", tmp_path, layerfuse=None if options == "environment" else options) as engine:
            hashes.add(engine.config.compute_hash())
    assert len(hashes) == 4
