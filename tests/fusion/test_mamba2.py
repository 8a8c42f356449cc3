"""Mamba-2 of transformers, compiled: with one group of heads its gated norm is the one of a row, and is fused; with more it is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from layerfuse import fusion, registry

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("_op_by_op")

GATED = "gated_rms_norm"
IDS = torch.arange(9)[None]


def small(groups: int, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = transformers.Mamba2Config(
        hidden_size=64, num_hidden_layers=2, vocab_size=64, num_heads=8, head_dim=16, state_size=16, n_groups=groups,
        chunk_size=8, residual_in_fp32=False, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return transformers.Mamba2ForCausalLM(config).to(dtype).eval()


def test_with_one_group_the_gated_norm_is_fused() -> None:
    model = small(1, torch.float32)
    fused = fusion.compile(model, strict=True)
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(input_ids=IDS, use_cache=False).logits
        logits = fused(input_ids=IDS, use_cache=False).logits
        audit = fused.audit(input_ids=IDS, use_cache=False)
    assert audit.ok, str(audit)
    assert (audit.fusions[GATED].expected, audit.fusions[GATED].profiled) == (2, 2)
    assert (audit.fusions["add_rms_norm"].expected, audit.fusions["add_rms_norm"].profiled) == (2, 2)
    assert (logits - exact).abs().max() < 1e-5 * exact.abs().max()


def test_a_scan_that_gives_another_dtype_than_the_gates_is_left_alone() -> None:
    # transformers' scan in plain torch gives float32, and the gate is the layer's own dtype.
    model = small(1, torch.bfloat16)
    fused = fusion.compile(model)
    with torch.no_grad():
        fused(input_ids=IDS, use_cache=False)
    assert "the inputs differ: torch.float32 on cpu and torch.bfloat16 on cpu" in str(fused.report)
    assert "add_rms_norm: 2 expected, 2 matched" in str(fused.report)


def test_with_more_groups_and_over_ranks_it_says_why_not() -> None:
    with torch.device("meta"):
        specs = registry.specs_in(small(2, torch.float32))
    plan = str(fusion.plan(specs, fusion.Target.named("gfx950")))
    assert "2 x refused: the norm takes its variance over 64 columns of 128" in plan
    ranks = [(path, spec.shard(4, 0)) for path, spec in specs]
    reasons = {each.reason for each in fusion.plan(ranks, fusion.Target.named("gfx950")).not_applicable(GATED)}
    assert reasons == {"its variance is over the heads of 2 ranks, which no kernel of a rank sees"}
