"""The script that measures the decode chain, without its clock: what every way computes is checked, and what is wrong stops it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import mla_chain

from layerfuse import MLASpec, registry
from layerfuse.fusion import ops
from layerfuse.fusion.ops.norm import normalise
from layerfuse.fusion.ops.rope import turn
from layerfuse.testing import small_entry

pytestmark = pytest.mark.usefixtures("_op_by_op")


@pytest.fixture(autouse=True)
def _without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = small_entry(registry.model("deepseek-v3"), layers=1)
    spec = next(spec for _, spec in entry.specs() if isinstance(spec, MLASpec))
    monkeypatch.setattr(mla_chain, "DEVICE", "cpu")
    monkeypatch.setattr(mla_chain, "spec_of", lambda heads: spec)
    monkeypatch.setattr(mla_chain, "LAYERS", {16: 2})
    monkeypatch.setattr(mla_chain, "PAGES", 2)
    monkeypatch.setattr(mla_chain, "captured", lambda calls, repeats: (None, [call() for call in calls]))
    monkeypatch.setattr(mla_chain, "in_turns", replayed)


def replayed(graphs: dict[str, Any], calls: int, rounds: int) -> dict[str, list[float]]:
    return {name: [1.0, 2.0] for name in graphs}


def forget_nothing_but_the_past(cache: torch.Tensor, before: torch.Tensor) -> None:
    """Graphs are not replayed here: what the first calls wrote stays."""
    if not cache.any():
        cache.copy_(before)


@pytest.fixture
def _kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla_chain, "forget", forget_nothing_but_the_past)


@pytest.mark.usefixtures("_kept")
@pytest.mark.parametrize("form", ["bf16", "fp8"])
def test_all_ways_of_a_case_are_run_and_checked(form: str) -> None:
    with torch.inference_mode():
        case = mla_chain.measured(16, 3, form, 2)
    names = {"inductor", "combo", "dual norm", "ops", "buffer", "absorb", "gemms"} - (
        {"buffer"} if form == "fp8" else set()
    )
    assert set(case["us"]) == names and set(case["differences"]) == names - {"gemms"}
    assert all(value < mla_chain.TOLERANCE[form] for parts in case["differences"].values() for value in parts.values())
    mla_chain.chain_table([case])


@pytest.mark.usefixtures("_kept")
def test_all_ways_of_a_whole_layer_are_run_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla_chain, "LENGTH", 128)
    with torch.inference_mode():
        case = mla_chain.measured(16, 3, "bf16", 2, attends=True)
    assert set(case["us"]) == set(case["differences"]) == {"inductor", "combo", "absorb"}
    mla_chain.chain_table([case])


@pytest.mark.usefixtures("_kept")
def test_a_wrong_result_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ops.mla_query_concat
    monkeypatch.setattr(ops, "mla_query_concat", lambda *args: right(*args) * 1.1)
    with torch.inference_mode(), pytest.raises(SystemExit, match=r"wrong results: \{'ops'"):
        mla_chain.measured(16, 3, "bf16", 2)


def test_every_op_is_timed_beside_a_copy_of_its_bytes() -> None:
    with torch.inference_mode():
        rows = [row for form in ("bf16", "fp8") for row in mla_chain.op_measured(2, 4, form, 2)]
    fp8 = ["mla_norm_rope_cache", "mla_query_concat", "mla_query_absorb"]
    assert [row["op"] for row in rows] == [*fp8, "mla_query_rope", *fp8]
    assert rows[0]["bytes"] == 2 * (2112 + 1536 + 576) * 2
    mla_chain.ops_table(rows)


def function_of_aiter(path: str) -> Any:
    """Functions as AITER's Triton ones, in plain torch."""

    def cat(latent: Any, rope: Any, k_nope: Any, k_pe: Any, positions: Any, cos: Any, sin: Any, is_neox: bool) -> Any:
        assert not is_neox and k_nope.shape[1] == k_pe.shape[1] == 1
        return torch.cat([latent, turn(rope, cos, sin, positions, "interleaved").to(rope.dtype)], -1), None

    def cache(q: Any, q_pe: Any, k: Any, k_pe: Any, into: Any, slots: Any, at: Any, cos: Any, sin: Any, scale: Any,
              is_neox: bool, apply_scale: bool, q_out_dtype: Any) -> Any:  # fmt: skip
        query, entries = (
            torch.cat([x.float(), turn(y, cos, sin, at, "interleaved")], -1) for x, y in ((q, q_pe), (k, k_pe))
        )
        into[slots] = (entries / (scale if apply_scale else 1.0)).to(into.dtype)
        return (query.to(q_out_dtype),)

    return {"rms_norm": normalise, "fused_qk_rope_cat": cat, "fused_qk_rope_cat_and_cache_mla": cache}[
        path.partition(":")[2]
    ]


def test_aiter_s_ops_are_timed_where_they_do_the_same() -> None:
    with torch.inference_mode():
        rows = [row for form in ("bf16", "fp8") for row in mla_chain.op_measured(3, 4, form, 2, function_of_aiter)]
    ways = [(row["op"], set(row["us"]) - {"op", "copy"}) for row in rows]
    both = ("both", {"aiter", "aiter, no norms"})
    norms, absorb = ("mla_norm_rope_cache", set()), ("mla_query_absorb", {mla_chain.mla_ops.GEMM})
    bf16 = [norms, ("mla_query_concat", {"aiter"}), absorb, ("mla_query_rope", set()), both]
    assert ways == [*bf16, norms, ("mla_query_concat", set()), absorb, both]
    mla_chain.ops_table(rows)


def test_a_wrong_result_of_aiter_stops_the_run() -> None:
    def wrong(path: str) -> Any:
        right = function_of_aiter(path)
        return (lambda *args: right(*args) * 1.1) if path.endswith(":rms_norm") else right

    with torch.inference_mode(), pytest.raises(SystemExit, match=r"AITER's cache differs from ours by \d\.\de-02"):
        mla_chain.op_measured(3, 4, "bf16", 2, wrong)


def test_a_folder_without_aiter_s_triton_ops_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="holds no aiter/ops/triton"):
        mla_chain.aiter_loader(tmp_path)
