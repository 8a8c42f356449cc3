"""Real layers of SGLang whose attributes were changed: what keeps parts gives what keeps nothing."""

from __future__ import annotations

import pytest
from slow_reading import check

sglang_layers = pytest.importorskip("sglang_layers")
from sglang_layers import build_model  # noqa: E402

from layerfuse import registry  # noqa: E402


@pytest.mark.parametrize("name", ["deepseek-v3", "gpt-oss-20b", "kimi-linear", "qwen3-next"])
def test_a_layer_that_was_changed_is_what_it_is_now(name: str) -> None:
    model = build_model(name, tp=2, rank=1)
    met = set()
    for path, spec in registry.specs_in(model):
        layer = model.get_submodule(path)
        kind = (type(layer), type(spec), getattr(spec, "experts", None) is None)
        if kind not in met and "layers." in path:
            met.add(kind)
            check(layer, path, 80)
    assert len(met) > 1
