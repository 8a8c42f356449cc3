"""Norms that quantise for the linears behind them in models that vLLM does not compile: vLLM's own layers and fp8 kernels, on CPU torch.

Run by `make test-engines` in an environment of its own.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("vllm_started")
from few_token_linears import BLOCKS
from reports import FIRST, Said, missed, told
from test_vllm_inside import as_installed, seen
from test_vllm_modules import GATED, HERE, counts
from test_vllm_plugin import ADD, COLUMNS, DUAL, GROUP_FP8, PER_TOKEN_FP8, ROWS, STATIC_FP8, TOKENS
from test_vllm_specs import PER_TOKEN
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor import custom_op
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm_started import Started, apart, close, fp8, quantised_as_on_cuda, started

from layerfuse.engines.native import native_methods
from layerfuse.engines.vllm import readers
from layerfuse.fusion import FusionMissedError
from layerfuse.fusion.backends import counting

NORM = "rms_norm"  # the first layer has no residual to add
PRODUCT = "silu_mul"  # of the dense layer: shared experts run with the others
LATENTS = 2 * (f"{DUAL}_group_quant" in HERE)  # of two layers; 0.26 has no switch for both latent norms
FORMATS = pytest.mark.parametrize(
    ("kernel", "quantised", "scheme"),
    [
        pytest.param(ROWS, contextlib.nullcontext, "group", id="row by row, plain torch"),
        pytest.param(ROWS, quantised_as_on_cuda, "group", id="row by row, vLLM's op", marks=pytest.mark.thorough),
        pytest.param(COLUMNS, contextlib.nullcontext, "group", id="column by column, plain torch"),
        pytest.param(TOKENS, contextlib.nullcontext, "per_token", id="per token, plain torch"),
        pytest.param(TOKENS, quantised_as_on_cuda, "per_token", id="per token, vLLM's op"),
        pytest.param(TOKENS, contextlib.nullcontext, "static", id="by a static scale, plain torch"),
    ],
)


@contextlib.contextmanager
def model(tmp_path: Path, layerfuse: Any, kernel: str = ROWS, scheme: str = "group") -> Iterator[Started]:
    """Two layers of DeepSeek-V3, a dense one and a mixture."""
    overrides = {"group": GROUP_FP8, "per_token": PER_TOKEN_FP8, "static": STATIC_FP8}[scheme]
    with (
        fp8(kernel),
        started(
            "deepseek-v3", tmp_path, layerfuse=layerfuse, mode="NONE", dtype="bfloat16", overrides=overrides
        ) as engine,
    ):
        yield engine


def asked(scheme: str = "group", **more: Any) -> dict[str, Any]:
    names = (ADD, NORM, PRODUCT, DUAL) if LATENTS else (ADD, NORM, PRODUCT)
    return {"fusions": [f"{name}_{scheme}_quant" for name in names], **more}


def sites(scheme: str = "group") -> list[str]:
    """The lines where every site is fused, called in the first run."""
    latents = [told(f"{DUAL}_{scheme}_quant", LATENTS, FIRST)] if LATENTS else []
    rest = [told(f"{NORM}_{scheme}_quant", 1, FIRST), told(f"{PRODUCT}_{scheme}_quant", 1, FIRST)]
    return [told(f"{ADD}_{scheme}_quant", 2, FIRST), *latents, *rest]


class Calls(TorchDispatchMode):
    """The calls of an op."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.calls = f"{name}.default", 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += str(func).partition(".")[2] == self.name
        return func(*args, **(kwargs or {}))


@FORMATS
def test_linears_take_what_the_norm_in_front_of_them_has_quantised(
    kernel: str, quantised: Any, scheme: str, tmp_path: Path, said: Said
) -> None:
    with quantised(), model(tmp_path, False, kernel, scheme) as engine:
        plain = [engine(tokens) for tokens in (6, 1, 33)]
    said.clear()
    with quantised(), model(tmp_path, asked(scheme, strict=True), kernel, scheme) as engine:
        assert all(close(engine(tokens), each) for tokens, each in zip((6, 1, 33), plain, strict=True))
    assert counts(said()) == sites(scheme)
    assert not any("another" in each or "does not" in each for each in said())


@pytest.mark.parametrize("powers_of_two", [False, True])
def test_linears_that_quantise_inside_of_their_product_take_it_too(
    powers_of_two: bool, tmp_path: Path, said: Said
) -> None:
    """As vLLM is installed on Hopper: layerfuse multiplies few tokens that were quantised before, and DeepGEMM more."""
    options: dict[str, Any] = {"mode": "NONE", "dtype": "bfloat16", "overrides": GROUP_FP8}
    nothing = native_methods()  # the kernels are plain torch here
    fusions = {"fusions": [*asked()["fusions"], BLOCKS], "strict": True}
    ours = 4 + LATENTS + 1 + 1
    with (
        as_installed(powers_of_two),
        mock.patch.object(readers, "native_methods", return_value=nothing),
        started("deepseek-v3", tmp_path, layerfuse=False, **options) as engine,
    ):
        given_to_kernels()  # in other tests
        plain = [engine(tokens) for tokens in (6, 40)]
        inside_theirs = given_to_kernels()
    said.clear()
    with (
        as_installed(powers_of_two),
        mock.patch.object(readers, "native_methods", return_value=nothing),
        started("deepseek-v3", tmp_path, layerfuse=fusions, **options) as engine,
    ):
        engine()  # in which both ways are compared
        given_to_kernels()
        with counting() as called:
            assert all(close(engine(tokens), each) for tokens, each in zip((6, 40), plain, strict=True))
        inside_ours = given_to_kernels()
    assert counts(said()) == [*sites(), told(BLOCKS, ours, FIRST)]
    assert called["block_scaled_linear"] == 2 * (4 + LATENTS + 1), "down_proj of the shared experts among them"
    assert called["group_quant_linear"] == 2 * 1, "their gate_up_proj"
    before, now = (Counter(whose for whose, _, _ in each) for each in (inside_theirs, inside_ours))
    assert before == {"FlashInfer": 10, "DeepGEMM": 10}
    assert now == {"FlashInfer": 10 - ours, "DeepGEMM": 10}
    assert {dtype for whose, dtype, _ in inside_ours if whose == "FlashInfer"} == {torch.bfloat16}


def test_in_a_step_that_the_host_launches_linears_quantise_for_themselves(tmp_path: Path) -> None:
    options: dict[str, Any] = {"mode": "NONE", "dtype": "bfloat16", "overrides": GROUP_FP8, "captured": 8}
    fusions = {"fusions": [*asked()["fusions"], BLOCKS], "strict": True}
    results, kernels, nothing = [], [], native_methods()  # the kernels are plain torch here
    for layerfuse in (False, fusions):
        with (
            as_installed(False),
            mock.patch.object(readers, "native_methods", return_value=nothing),
            started("deepseek-v3", tmp_path, layerfuse=layerfuse, **options) as engine,
        ):
            engine()  # in which both ways are compared
            first = engine(6)
            given_to_kernels()
            with counting() as called:
                results.append(engine(40))
            kernels.append(given_to_kernels())
            assert {*called} <= {"quantise_group"}  # what stands for vLLM's kernels calls it
            with counting() as called:
                assert all(torch.equal(*both) for both in zip(engine(6), first, strict=True))
            assert (called["block_scaled_linear"] > 0) is bool(layerfuse)
    assert all(torch.equal(*both) for both in zip(*results, strict=True))
    assert Counter(whose for whose, _, _ in kernels[1]) == Counter(whose for whose, _, _ in kernels[0])


def test_a_gated_norm_hands_over_its_heads_joined(tmp_path: Path, said: Said) -> None:
    """vLLM flattens the heads that the norm gives before the linear reads them."""
    results, asked_for = [], {"fusions": [f"{GATED}_per_token_quant"], "strict": True}
    heads = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}  # vLLM pads fp8 weights to 16 columns
    options: dict[str, Any] = {
        "mode": "NONE",
        "dtype": "bfloat16",
        "overrides": {"quantization_config": PER_TOKEN, **heads},
    }
    for layerfuse in (False, asked_for):
        with fp8(TOKENS), started("qwen3-next", tmp_path, layerfuse=layerfuse, **options) as engine:
            results.append([engine(tokens) for tokens in (6, 33)])
    tokens = [rows for both in zip(*results, strict=True) for rows in zip(*both, strict=True)]
    assert max(apart(*rows) for rows in tokens) < 0.06  # 0.033: roundings to 8 bits, which the next layers carry on
    assert counts(said()) == [told(f"{GATED}_per_token_quant", 3, FIRST)]


def given_to_kernels() -> list[Any]:
    """What the kernels were given since the last time."""
    found = seen.copy()
    seen.clear()
    return found


def test_vllms_quantisers_are_not_called_where_the_norm_has_quantised(tmp_path: Path) -> None:
    calls = []
    for options in (False, asked(strict=True)):
        with quantised_as_on_cuda(), model(tmp_path, options) as engine:
            engine()  # in which both ways are compared
            with Calls("per_token_group_fp8_quant") as counted:
                engine()
            calls.append(counted.calls)
    assert calls == [8, 8 - 4 - LATENTS]


def test_a_norm_that_is_changed_on_its_way_is_quantised_by_vllm(tmp_path: Path, said: Said) -> None:
    """In place, so that the tensor is the same: the first call of each linear compares both ways."""

    def twice(_: Any, args: tuple[Any, ...]) -> None:
        args[0].mul_(2)

    results = []
    for options in (False, asked()):
        said.clear()
        with model(tmp_path, options) as engine:
            engine.model.model.layers[0].mlp.gate_up_proj.register_forward_pre_hook(twice)
            results.append([engine(), engine(3)])
    assert all(close(*each) for each in zip(*results, strict=True))
    lines = said()
    assert f"{ADD}_group_quant: 2 expected, 1 fused, 1 missed; called 2 times in the first run" in lines
    assert any("layers.0:post_attention: what runs there computes something else" in each for each in lines)


def test_where_no_linear_is_given_the_norms_result_that_is_a_miss(tmp_path: Path) -> None:
    def copied(_: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (args[0].clone(), *args[1:])

    with model(tmp_path, asked(strict=True)) as engine:
        engine.model.model.layers[0].mlp.gate_up_proj.register_forward_pre_hook(copied)
        with pytest.raises(FusionMissedError, match="no linear behind it asked for what the op had quantised"):
            engine()


@pytest.mark.parametrize(
    ("place", "fusions"), [(QuantFP8, asked()["fusions"]), (SiluAndMul, [f"{PRODUCT}_group_quant"])]
)
def test_what_another_plugin_wraps_is_left_alone(
    place: Any, fusions: list[str], tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quantiser, and a product, which is a static method."""
    own, held = place.forward_native, vars(place)["forward_native"]

    @functools.wraps(own)
    def louder(*args: Any, **kwargs: Any) -> Any:
        found = own(*args, **kwargs)
        return (found[0], found[1] * 2) if isinstance(found, tuple) else found * 2

    monkeypatch.setattr(place, "forward_native", type(held)(louder) if isinstance(held, staticmethod) else louder)
    results = []
    for options in (False, {"fusions": fusions}):
        said.clear()
        with model(tmp_path, options) as engine:
            results.append(engine())
    assert torch.equal(*results)
    assert place is QuantFP8 or missed(f"{PRODUCT}_group_quant", 1, 0, FIRST) in said()
    assert any("is not vLLM's own: it is from test_vllm_handover" in each for each in said())


class Derived(QuantFP8):
    """As another package's: it may do something else."""


def test_a_derived_quantiser_is_left_alone(tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm alone is fused there where that is asked for too: the plan's fallback."""
    monkeypatch.setitem(custom_op.op_registry_oot, "QuantFP8", Derived)  # what CustomOp.register_oot does
    for more, calls in (([], 0), ([ADD], 4)):
        said.clear()
        with model(tmp_path, {"fusions": [*asked()["fusions"], *more]}) as engine, Calls(ADD) as counted:
            engine()
        lines = said()
        assert missed(f"{ADD}_group_quant", 2, 0, FIRST) in lines
        assert any("does not quantise in a way that layerfuse knows a place in" in each for each in lines)
        assert not any("problem" in each for each in lines)
        assert counted.calls == calls
