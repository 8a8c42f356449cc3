"""Delta nets of transformers, compiled: the recurrence is one op, the gated norm is fused, and what ran is counted."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from fusion_support import graph_text
from helpers import in_turn

from layerfuse import fusion, registry
from layerfuse.fusion.recurrences import _OPTIONS
from layerfuse.testing import small_model
from layerfuse.verify import one_of_each

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("_op_by_op")

GATED = "gated_rms_norm"
MODELS = {
    "qwen3-next-80b-a3b": "torch_chunk_gated_delta_rule",
    "qwen3.5-27b": "torch_chunk_gated_delta_rule",
    "kimi-linear-48b-a3b": "chunk_kimi_delta_attention",
}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
IDS = torch.arange(9)[None]


def small(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    few = one_of_each(registry.model(name))
    torch.manual_seed(0)
    return small_model(few, layers=few.num_hidden_layers, dtype=dtype, **changes)


@pytest.mark.parametrize(
    ("name", "dtype"),
    # The dense one decodes below.
    [
        *in_turn(["qwen3-next-80b-a3b", "kimi-linear-48b-a3b"], TOLERANCE),
        *(pytest.param("qwen3.5-27b", dtype, marks=pytest.mark.thorough) for dtype in TOLERANCE),
    ],
    ids=str,
)
def test_a_whole_model_is_one_graph_with_its_gated_norms_fused(name: str, dtype: torch.dtype) -> None:
    model = small(name, dtype)
    kept = fusion.keep_recurrences(model)
    assert MODELS[name] in {each.rpartition(".")[2] for each in kept}
    assert len(kept) == 2  # one for many tokens, one for a single one
    fused = fusion.compile(model, strict=True)
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(input_ids=IDS, use_cache=False).logits
        eager = model(input_ids=IDS, use_cache=False).logits
        logits = fused(input_ids=IDS, use_cache=False).logits
        audit = fused.audit(input_ids=IDS, use_cache=False)
    assert audit.ok, str(audit)
    assert fused.report.graphs == 1
    found = audit.fusions[GATED]
    assert found.expected == found.profiled == found.counted >= 1
    assert audit.fusions["add_rms_norm"].profiled == audit.fusions["add_rms_norm"].expected >= 3
    for other in (eager, exact):
        assert (logits - other).abs().max() < TOLERANCE[dtype] * exact.abs().max()


def test_the_recurrence_is_one_op_of_the_graph() -> None:
    model = small("qwen3-next-80b-a3b")
    fusion.keep_recurrences(model)
    texts: list[str] = []

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        texts.append(graph_text(gm.graph))
        return gm

    with torch.no_grad():
        torch.compile(model, backend=backend)(input_ids=IDS, use_cache=False)
    assert len(texts) == 1
    assert texts[0].count("layerfuse_recurrence.") == 1
    assert len(texts[0].splitlines()) < 1000  # traced into, the recurrence alone has thousands of nodes


def test_decoding_with_a_cache_takes_the_other_recurrence() -> None:
    model = small("qwen3.5-27b")
    fusion.keep_recurrences(model)
    fused = fusion.compile(model)

    def decode(run: Any) -> torch.Tensor:
        with torch.no_grad():
            cache = run(input_ids=IDS, use_cache=True).past_key_values
            return torch.cat(
                [run(input_ids=torch.full((1, 1), i), past_key_values=cache, use_cache=True).logits for i in (3, 5)]
            )

    wanted = decode(model)
    torch.testing.assert_close(decode(fused), wanted, rtol=1e-4, atol=1e-5)
    assert fused.report.of(GATED).matched == fused.report.of(GATED).expected != ()
    assert fused.report.last is not None and fused.report.last.fused(GATED) >= 1


@pytest.mark.parametrize("asked", [True, False])
def test_torch_is_told_what_a_recurrence_gives(asked: bool) -> None:
    """A state in float32, whatever the model's dtype is."""
    rows, gates = torch.randn(1, 9, 2, 8, dtype=torch.bfloat16), torch.rand(1, 9, 2, dtype=torch.bfloat16)
    options = {**_OPTIONS, "output_final_state": asked}
    for name in fusion.keep_recurrences(small("qwen3.5-27b", torch.bfloat16)):
        op = getattr(torch.ops.layerfuse_recurrence, name.replace(".", "_")).default
        torch.library.opcheck(op, (rows, rows, rows, -gates, gates, *options.values()), test_utils="test_faketensor")


def test_keeping_twice_and_having_none() -> None:
    model = small("qwen3-next-80b-a3b")
    assert fusion.keep_recurrences(model) == fusion.keep_recurrences(model) != ()
    assert fusion.keep_recurrences(torch.nn.Linear(2, 2)) == ()
