"""Real layers of vLLM whose attributes were changed: what keeps parts gives what keeps nothing."""

from __future__ import annotations

import pytest
from slow_reading import check

vllm_layers = pytest.importorskip("vllm_layers")
from test_vllm_specs import BLOCK  # noqa: E402
from vllm_layers import MODELS, build_model, fp8_kernel  # noqa: E402

from layerfuse import registry  # noqa: E402

BUILT = [
    ("deepseek-v3", None),
    ("deepseek-v3", BLOCK),
    ("gpt-oss-20b", None),
    ("kimi-linear", None),
    ("qwen3-next", None),
]


@pytest.mark.parametrize(("name", "quant"), [each for each in BUILT if each[0] in MODELS])
def test_a_layer_that_was_changed_is_what_it_is_now(name: str, quant: dict[str, object] | None) -> None:
    told = {} if quant is None else {"quantization_config": quant}
    with fp8_kernel("deep_gemm:DeepGemmFp8BlockScaledMMKernel"):
        model = build_model(name, tp=2, rank=1, **told)
    met = set()
    for path, spec in registry.specs_in(model):
        layer = model.get_submodule(path)
        kind = (type(layer), type(spec), getattr(spec, "experts", None) is None)
        if kind not in met and "layers." in path:
            met.add(kind)
            check(layer, path, 80)
    assert len(met) > 1
