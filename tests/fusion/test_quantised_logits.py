"""Level-2 fusions on whole models: the fused logits are no farther from float64 than the unfused quantised model's."""

from __future__ import annotations

import pytest
import torch
from helpers import in_turn

pytest.importorskip("transformers")

import quantised_logits

FARTHER = {"mean": 1.15, "max": 1.5}
"""How much farther the fused logits may be: on average, and at the one worst logit of a few thousand."""

SITES = {"deepseek-v3": 9, "qwen3-next": 9, "llama": 7}
"""Expected fusions of two layers and the final norm: an MLP each, latents or a delta net's output where there are any."""


SCHEMES = [(torch.bfloat16, "static"), (torch.bfloat16, "group64"), (torch.float32, "per_token")]


@pytest.mark.usefixtures("_op_by_op")  # the arithmetic is that of the ops
@pytest.mark.parametrize(("name", "kind"), in_turn(quantised_logits.MODELS, SCHEMES), ids=str)
def test_no_farther_from_float64(name: str, kind: tuple[torch.dtype, str]) -> None:
    dtype, scheme = kind
    found = quantised_logits.measured(name, dtype, scheme)
    # It is strict too: an expected fusion that did not run has raised.
    assert found["expected"] == sum(found["executed"].values()) == SITES[name], found
    word = {"group64": "group", "per_token": "per_token", "static": "static"}[scheme]
    assert all(fused.endswith(f"_{word}_quant") or fused == "qk_norm_rope" for fused in found["executed"]), found
    for what, factor in FARTHER.items():
        assert found[f"ac_{what}"] <= factor * found[f"ab_{what}"], found
    # In float32 both round alike, but for values that lie on a tie. In bfloat16 the unfused one rounds each norm first, so
    # that the errors of the two quantisations grow apart: independent ones would be the root of two apart.
    assert found["bc_mean"] <= found["ab_mean"] * (0.5 if dtype == torch.float32 else 1.5), found
