"""MLA decode layers in plain torch, compiled: their norms, ropes, cache writes and queries become the ops of the decode chain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decode_support import (
    CONCAT,
    DUAL,
    FP8,
    PAGES,
    ROPES,
    SM90,
    WRITE,
    Decoding,
    bytes_of,
    compiled,
    config,
    decode_layer,
    decode_spec,
    inputs,
    placed,
)

from layerfuse import fusion
from layerfuse.adapters.activation_quant import ActivationQuant
from layerfuse.fusion import backends

CACHES: dict[str, dict[str, Any]] = {
    "pages": {},
    "slots": {"page_size": None},
    "fp8 pages": {"cache": "fp8"},
    "fp8 slots": {"cache": "fp8", "page_size": None},
}


@pytest.mark.parametrize("query", [None, FP8], ids=["plain query", "fp8 query"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("rope", ROPES)
def test_a_plain_decode_layer_runs_as_two_ops(rope: str, cache: str, query: torch.dtype | None) -> None:
    spec = decode_spec(rope=ROPES[rope])
    made = {**CACHES[cache], "query_dtype": query}
    plain, ops, unfused = (decode_layer(spec, way, **made) for way in ("plain", "ops", "plain"))
    args = inputs()
    quant = {} if query is None else {"query": ActivationQuant(fixed="static")}
    with backends.counting() as called:
        traced = compiled(Decoding(plain), *args, specs=placed(spec), config=config(quant=quant, level=2))
    concat = CONCAT if query is None else f"{CONCAT}_static_quant"
    assert (called[WRITE], called[concat], sum(called.values())) == (1, 1, 2)
    assert not traced.report.missed()
    assert (traced.report.of(WRITE).last_call, traced.report.of(concat).last_call) == (1, 1)
    with torch.inference_mode():
        wanted, rounded = ops.query(*args), unfused.query(*args)
    (got,) = traced.output
    # The same op on the same numbers.
    torch.testing.assert_close(got.float(), wanted.float(), rtol=0.0, atol=0.0)
    assert torch.equal(bytes_of(plain.cache), bytes_of(ops.cache))
    # What was written in plain torch is rounded more often.
    step = 0.02 if query is None else 0.13
    torch.testing.assert_close(got.float(), rounded.float(), rtol=step, atol=0.06 if query is None else 2.0)
    step = 0.02 if plain.cache.dtype == torch.bfloat16 else 0.13
    torch.testing.assert_close(plain.cache.float(), unfused.cache.float(), rtol=step, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_other_dtypes(dtype: torch.dtype) -> None:
    spec = decode_spec()
    plain, unfused = (decode_layer(spec, dtype=dtype) for _ in range(2))
    traced = compiled(Decoding(plain), *inputs(dtype), specs=placed(spec))
    assert (traced.report.of(WRITE).last_call, traced.report.of(CONCAT).last_call) == (1, 1)
    with torch.inference_mode():
        wanted = unfused.query(*inputs(dtype))
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-3, "atol": 4e-3}
    torch.testing.assert_close(traced.output[0], wanted, **tolerance)
    torch.testing.assert_close(plain.cache, unfused.cache, **tolerance)


@pytest.mark.parametrize("dynamic", [False, True])
def test_several_layers_for_any_number_of_tokens(dynamic: bool) -> None:
    specs = [decode_spec(rope=rope) for rope in ROPES.values()]
    layers, others = ([decode_layer(spec, way, seed=i) for i, spec in enumerate(specs)] for way in ("plain", "ops"))
    traced = compiled(Decoding(*layers), *inputs(), specs=placed(*specs), dynamic=dynamic)
    assert not traced.report.missed()
    assert traced.report.last.ran == {
        **{(f"layers.{i}:latents", WRITE): 1 for i in range(3)},
        **{(f"layers.{i}:query", CONCAT): 1 for i in range(3)},
    }
    with torch.inference_mode():
        wanted = Decoding(*others)(*inputs())
    for one, other, layer, beside in zip(traced.output, wanted, layers, others, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(layer.cache, beside.cache)


def test_one_token() -> None:
    """Every leading dimension is 1: nothing tells tokens from anything else, and nothing has to."""
    spec = decode_spec()
    plain, ops = decode_layer(spec), decode_layer(spec, "ops")
    traced = compiled(Decoding(plain), *inputs(tokens=1), specs=placed(spec), dynamic=False)
    assert not traced.report.missed()
    with torch.inference_mode():
        assert torch.equal(traced.output[0], ops.query(*inputs(tokens=1)))
    assert torch.equal(plain.cache, ops.cache)


def test_the_query_latent_is_quantised_in_the_same_launch() -> None:
    spec = decode_spec()
    layer = decode_layer(spec)
    linear = torch.nn.functional.linear

    def quantised(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] != spec.q_lora_rank:
            return linear(x, weight)
        scale = (x.float().abs().amax(-1, keepdim=True) / 448.0).clamp(min=1e-12)
        return linear(((x.float() / scale).clamp(-448.0, 448.0).to(FP8).float() * scale).to(x.dtype), weight)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", quantised)
        traced = compiled(
            Decoding(layer), *inputs(), specs=placed(spec), config=config(quant={"latents": ActivationQuant()}, level=2)
        )
    assert traced.report.of(f"{WRITE}_per_token_quant").last_call == 1


def test_inductor_writes_to_the_cache_in_place_and_launches_nothing_else() -> None:
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    spec = decode_spec()
    plain, ops = (decode_layer(spec, way) for way in ("plain", "ops"))
    fast = fusion.compile(Decoding(plain), specs=placed(spec), target=SM90, config=config(), strict=True)
    with torch.inference_mode():
        (got,), codes = run_and_get_code(fast, *inputs())
        wanted = ops.query(*inputs())
        audit = fast.audit(*inputs())
    assert torch.equal(got, wanted)
    assert torch.equal(plain.cache, ops.cache)
    assert audit.ok, audit
    assert (audit.fusions[WRITE].profiled, audit.fusions[CONCAT].profiled) == (1, 1)
    (code,) = codes
    assert f"({PAGES}, 4, 576)" in code
    assert f"empty_strided_cpu(({PAGES}, 4, 576)" not in code, "the cache is copied"
    assert "cpp_fused" not in code, "something else is launched"


def test_off_unless_switched_on() -> None:
    spec = decode_spec()
    traced = compiled(Decoding(decode_layer(spec)), *inputs(), specs=placed(spec), config=fusion.FusionConfig())
    assert traced.report.of(DUAL).last_call == 1
    for name in (WRITE, CONCAT):
        (reason,) = traced.report.of(name).not_applicable.values()
        assert reason == f"{name} is off unless switched on: it was not benchmarked in torch.compile"
