"""The query of MLA: what AITER's functions do with it in the stand-ins, what its backend says, and what broken input gives."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from check_tools import installed
from query_checks import LATENT, LEADING, MLA_OPS, POSITIONS, ROPE, query
from standin import StandInMisuse, behaviour_queries, shared_standin

from layerfuse.fusion import ops
from layerfuse.fusion.backends import aiter as amd
from layerfuse.fusion.backends import survey
from layerfuse.fusion.backends.aiter import AiterCallError, queries
from layerfuse.fusion.backends.aiter.backend import Aiter
from layerfuse.fusion.latent_ops import MLA_QUERY_CONCAT
from layerfuse.fusion.ops.library import case_maker

SOME = ("v0.1.16.post3", "v0.1.20.post1")


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


# ---- what an op's backend makes of it --------------------------------------------------------------------------------


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
        asked = Aiter(op=MLA_QUERY_CONCAT)
        assert asked.runs_on("cuda")[0]
        reason = asked.refuses(case)
        assert (reason is None) is (says is None), reason
        if says is None:
            assert torch.equal(asked.load_for(case)(*args), ops.mla_query_concat(*args))
        else:
            assert reason is not None and says in reason
