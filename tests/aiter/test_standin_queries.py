"""The query of MLA: what AITER's functions do with it in the stand-ins, what its backend says, and what broken input gives.

The functions that write a cache too serve no op of ours. The reasons that are given for that are shown here to be true of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from check_tools import FP8, installed
from query_checks import LATENT, LEADING, MLA_OPS, POSITIONS, ROPE, query
from standin import StandInMisuse, behaviour_queries, shared_standin

from layerfuse.fusion import ops
from layerfuse.fusion.backends import aiter as amd
from layerfuse.fusion.backends import survey
from layerfuse.fusion.backends.aiter import AiterCallError, backend, queries
from layerfuse.fusion.latent_ops import MLA_QUERY_CONCAT
from layerfuse.fusion.ops.library import case_maker

SOME = ("v0.1.5", "v0.1.9.post1", "v0.1.10", "v0.1.20.post1")
SCALE = 0.25


def of(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


# ---- what is bound ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("release", SOME)
@pytest.mark.parametrize("position", [-1, POSITIONS, 2**40])
def test_a_position_outside_the_tables_gives_nan_and_reads_nothing_there(release: str, position: int) -> None:
    latent, rope, cos, sin, _ = query(3)
    positions = torch.tensor([4, position, 2])
    with installed(shared_standin(release)):
        call = amd.bound("mla_query_concat").call
        found = call(latent, rope, cos, sin, positions, "interleaved")
        assert found[1, :, LATENT:].isnan().all()
        assert torch.equal(found[..., :LATENT], latent)
        inside = MLA_QUERY_CONCAT.reference(latent[::2], rope[::2], cos, sin, positions[::2], "interleaved")
        assert torch.equal(found[::2], inside)
        function = of(amd.bound("mla_query_concat").path)
        with pytest.raises(StandInMisuse, match="a position outside the tables"):
            function(latent, rope, latent[:, :1], rope[:, :1], positions, cos, sin, False)


def test_tables_without_a_row_are_an_error() -> None:
    latent, rope, cos, sin, positions = query(3)
    with installed(shared_standin("v0.1.20")), pytest.raises(AiterCallError, match="cos and sin have no rows"):
        amd.bound("mla_query_concat").call(latent, rope, cos[:0], sin, positions, "halves")


def test_tables_that_lie_otherwise_than_one_another() -> None:
    latent, rope, cos, sin, positions = query(5)
    given = latent, rope, cos, sin.contiguous(), positions, "halves"
    with installed(shared_standin("v0.1.20")):
        assert torch.equal(amd.bound("mla_query_concat").call(*given), MLA_QUERY_CONCAT.reference(*given))


@pytest.mark.parametrize(("binding", "pairs"), [("mla_query_concat", "halves"), ("mla_query_concat.cat", "none")])
def test_what_int32_cannot_count_takes_several_launches(
    monkeypatch: pytest.MonkeyPatch, binding: str, pairs: str
) -> None:
    """With the kernels' reach cut to that of two tokens."""
    for module in (queries, behaviour_queries):
        monkeypatch.setattr(module, "REACH", 2 * 3 * (LATENT + ROPE))
    with installed(shared_standin("v0.1.20")):
        for leading in LEADING:
            given = *query(*leading), pairs
            assert torch.equal(amd.bound(binding).call(*given), MLA_QUERY_CONCAT.reference(*given))


# ---- what is refused, and that it must be ----------------------------------------------------------------------------


def key(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(tokens, 512, generator=generator).bfloat16(), torch.randn(
        tokens, 64, generator=generator
    ).bfloat16()


def given(tokens: int, slots: list[int], cache: torch.dtype, out: torch.dtype) -> dict[str, Any]:
    """The arguments of the C++ function, at the widths that compute_all_q_rope takes."""
    generator = torch.Generator().manual_seed(4)
    cos, sin = torch.randn(POSITIONS, 64, generator=generator).bfloat16().chunk(2, -1)
    kv, k_rope = key(tokens)
    return {
        "q_nope": torch.randn(tokens, 4, 512, generator=generator).bfloat16(),
        "q_pe": torch.randn(tokens, 4, 64, generator=generator).bfloat16(),
        "kv_c": kv,
        "k_pe": k_rope,
        "kv_cache": torch.zeros(8, 1, 576).to(cache),
        "q_out": torch.full((tokens, 4, 576), 3.0).to(out),
        "slot_mapping": torch.tensor(slots),
        "k_scale": torch.tensor([SCALE]),
        "q_scale": torch.tensor([SCALE]),
        "positions": torch.arange(tokens),
        "cos_cache": cos,
        "sin_cache": sin,
        "is_neox": False,
        "is_nope_first": True,
    }


HIP = "aiter.ops.cache:fused_qk_rope_concat_and_cache_mla"


@pytest.mark.parametrize("release", ["v0.1.8", "v0.1.19", "v0.1.20"])
def test_the_function_of_hip_leaves_the_query_of_padding_unwritten(aiter_of: Callable[..., Any], release: str) -> None:
    aiter_of(release)
    args = given(3, [5, -1, 0], torch.bfloat16, torch.bfloat16)
    of(HIP)(**args)
    assert (args["q_out"][1] == 3.0).all() and not (args["q_out"][::2] == 3.0).all()
    assert torch.equal(args["kv_cache"][5, 0, :512], args["kv_c"][0]), "it is written as it came: nothing is normed"
    assert not args["kv_cache"][[1, 2, 3, 4, 6, 7]].any()
    if release == "v0.1.20":
        of(HIP)(**args, compute_all_q_rope=True)
        assert torch.equal(args["q_out"][..., :512], args["q_nope"])
        narrow = {name: args[name][..., :256] for name in ("q_nope", "kv_c")} | {"q_out": args["q_out"][..., :320]}
        cache = args["kv_cache"][..., :320].contiguous()
        of(HIP)(**args | narrow | {"kv_cache": cache}, compute_all_q_rope=True)
        with pytest.raises(RuntimeError, match="only supported by the per-head"):
            of(HIP)(**args | narrow | {"kv_cache": cache.view(4, 2, 320)}, compute_all_q_rope=True)


def test_the_function_of_hip_divides_by_its_scales(aiter_of: Callable[..., Any]) -> None:
    aiter_of("v0.1.20")
    args = given(2, [0, 1], FP8, FP8)
    of(HIP)(**args)
    torch.testing.assert_close(args["q_out"][..., :512].float() * SCALE, args["q_nope"].float(), rtol=0.07, atol=0.01)
    torch.testing.assert_close(
        args["kv_cache"][:2, 0, :512].float() * SCALE, args["kv_c"].float(), rtol=0.07, atol=0.01
    )
    with pytest.raises(RuntimeError, match="q_out data type is fp8"):
        of(HIP)(**given(2, [0, 1], torch.bfloat16, FP8))


def test_no_function_looks_for_the_end_of_the_cache_or_at_the_tables_dtype(aiter_of: Callable[..., Any]) -> None:
    aiter_of("v0.1.20")
    with pytest.raises(StandInMisuse, match="a slot behind the end of the cache"):
        of(HIP)(**given(2, [0, 8], torch.bfloat16, torch.bfloat16))
    args = given(2, [0, 1], torch.bfloat16, torch.bfloat16)
    with pytest.raises(StandInMisuse, match=r"the tables are torch.float32, but would be read as torch.bfloat16"):
        of(HIP)(**args | {"cos_cache": args["cos_cache"].float(), "sin_cache": args["sin_cache"].float()})
    with pytest.raises(StandInMisuse, match="a slot behind the end of the cache"):
        triton(given(2, [0, 8], torch.bfloat16, torch.bfloat16))


def triton(args: dict[str, Any], **options: Any) -> Any:
    return of("aiter.ops.triton.fusions.fused_kv_cache:fused_qk_rope_cat_and_cache_mla")(
        args["q_nope"], args["q_pe"], args["kv_c"][:, None], args["k_pe"][:, None], args["kv_cache"], args["slot_mapping"],
        args["positions"], args["cos_cache"], args["sin_cache"], args["k_scale"], False, **options,
    )  # fmt: skip


def test_the_function_of_triton_scales_the_cache_and_not_the_query(aiter_of: Callable[..., Any]) -> None:
    aiter_of("v0.1.20")
    args = given(2, [0, -1], FP8, FP8)
    query_out = triton(args, q_out_dtype=FP8)[0]
    assert torch.equal(query_out[..., :512].float(), args["q_nope"].to(FP8).float())
    torch.testing.assert_close(
        args["kv_cache"][0, 0, :512].float() * SCALE, args["kv_c"][0].float(), rtol=0.07, atol=0.01
    )
    assert not args["kv_cache"][1:].float().any()


# ---- what an op's backend makes of it --------------------------------------------------------------------------------

REASONS = {
    "mla_query_rope": "it allocates the query that it gives",
    "mla_query_concat_static_quant": "a token whose slot is below 0 gets no query",
    **dict.fromkeys([name for name in MLA_OPS if name.startswith("mla_norm")], "it norms nothing, and turns a query"),
}


@pytest.mark.parametrize("name", REASONS)
def test_an_op_that_aiter_has_nothing_for_says_why(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.2")
    with installed(shared_standin("v0.1.20")):
        runs, why = backend.backend(name).runs_on("cuda")
        assert not runs
        assert REASONS[name] in why


def test_the_kernel_of_one_launch_is_asked_before_aiter() -> None:
    served = {binding.op for binding in amd.BINDINGS}
    assert served & {*MLA_OPS}
    for name in MLA_OPS:
        middle = ["aiter"] if name in served else []
        assert [each for each, _ in survey(name, "cpu")] == ["triton", *middle, "reference"]


@pytest.mark.parametrize(
    ("change", "pairs", "says"),
    [
        ({}, "interleaved", None),
        ({"dtype": torch.float16}, "halves", None),
        ({"table": torch.bfloat16}, "none", None),
        ({"table": torch.bfloat16}, "halves", "tables of cos and sin other than float32"),
        ({}, "interleaved_to_halves", "read as neighbours and written as halves"),
    ],
)
def test_an_op_s_case_is_asked_and_served_by_the_function_for_it(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], pairs: str, says: str | None
) -> None:
    args = *query(3, **change), pairs
    case = case_maker(MLA_QUERY_CONCAT)(*args)
    monkeypatch.setattr(torch.version, "hip", "7.2")
    with installed(shared_standin("v0.1.20")):
        asked = backend.backend("mla_query_concat")
        assert asked.runs_on("cuda")[0]
        reason = asked.refuses(case)
        assert (reason is None) is (says is None), reason
        if says is None:
            assert asked.load_for is not None
            assert torch.equal(asked.load_for(case)(*args), ops.mla_query_concat(*args))
        else:
            assert reason is not None and says in reason
