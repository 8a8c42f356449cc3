"""Linears of shared experts, which vLLM runs behind an op of its own: few tokens are layerfuse's there too, or all are vLLM's, and it says why.

Run by `make test-engines` in an environment of its own.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("vllm_started")
from few_token_linears import BLOCKS
from reports import FIRST, Said, missed, told
from test_vllm_inside import KERNELS, as_installed, as_vllm_has_them, seen
from test_vllm_plugin import ADD, GROUP_FP8, written
from torch import Tensor
from vllm_started import Started, close, started

from layerfuse.adapters.errors import counted
from layerfuse.adapters.linear_quant import quantiser_of
from layerfuse.engines.native import native_methods
from layerfuse.engines.vllm import readers, shared_experts
from layerfuse.engines.vllm.readers import PRODUCT
from layerfuse.fusion.backends import counting

ALL, ADDS = "all", f"{ADD}_group_quant,{BLOCKS}"
CLASS = KERNELS.FlashInferFp8DeepGEMMDynamicBlockScaledKernel
_own = getattr(CLASS, PRODUCT)


@contextlib.contextmanager
def model(tmp_path: Path, fusions: str, mode: str = "NONE", **options: Any) -> Iterator[Started]:
    """Two layers of DeepSeek-V3, of which the second is a mixture, with vLLM's linears as on Hopper."""
    given: dict[str, Any] = {"mode": mode, "dtype": "bfloat16", "overrides": GROUP_FP8, **options}
    with (
        as_installed(),
        # The two kernels behind the op are plain torch here.
        mock.patch.object(readers, "native_methods", return_value=native_methods()),
        started("deepseek-v3", tmp_path, layerfuse={"fusions": fusions}, **given) as engine,
    ):
        yield engine


def shared_of(engine: Started) -> Any:
    """The MLP of the shared experts."""
    return engine.model.get_submodule("model.layers.1.mlp.shared_experts")


def kernels(engine: Started) -> list[Any]:
    return [quantiser_of(linear) for linear in (shared_of(engine).gate_up_proj, shared_of(engine).down_proj)]


def given_to_vllm(engine: Started, tokens: int) -> tuple[int, dict[str, int]]:
    """Products of vLLM's kernels in one call of the shared experts, and calls of layerfuse's ops there."""
    x = torch.rand(tokens, 256, generator=torch.Generator().manual_seed(3)).bfloat16() - 0.5
    seen.clear()
    with counting() as called:
        got = shared_of(engine)(x)
    # The kernels that stand in for FlashInfer's and DeepGEMM's quantise by an op of layerfuse's.
    ours = len(seen), {name: calls for name, calls in called.items() if name != "quantise_group"}
    with as_vllm_has_them(engine.model):
        assert close(got, shared_of(engine)(x))
    return ours


@pytest.mark.parametrize("mode", ["NONE", "VLLM_COMPILE"])
def test_their_products_and_what_stands_between_are_layerfuses_with_few_tokens(mode: str, tmp_path: Path) -> None:
    ops = {"group_quant_linear": 1, "block_scaled_linear": 1, "silu_mul_group_quant_with_product": 1}
    with model(tmp_path, ALL, mode) as engine:
        assert given_to_vllm(engine, 40) == (3, ops), "the first time both ways are compared"
        assert given_to_vllm(engine, 16) == (0, ops)
        assert given_to_vllm(engine, 17) == (2, ops)


def test_a_report_counts_them_apart_from_the_sites_of_graphs(tmp_path: Path, said: Said) -> None:
    """Of three layers two are mixtures."""
    layers = {"num_hidden_layers": 3, "first_k_dense_replace": 1}
    with model(tmp_path, ALL, "VLLM_COMPILE", overrides=GROUP_FP8 | layers) as engine:
        engine()
    assert told("silu_mul_group_quant", 1) in said()
    assert told(BLOCKS, 15) in said()
    assert not any(line.startswith("problem") for line in said())
    *pieces, last = written(tmp_path)["graphs"]
    assert last["source"] == "module" and "module" not in [piece["source"] for piece in pieces]
    assert len({use["site"] for use in last["uses"]}) == 4, "two products of two mixtures' shared experts"
    assert {use["fused"] for use in last["uses"]} == {BLOCKS}


def test_a_report_of_a_model_that_is_not_compiled_counts_them(tmp_path: Path, said: Said) -> None:
    with model(tmp_path, ALL) as engine:
        engine()
    assert told(BLOCKS, 8, FIRST) in said()
    (path,) = tmp_path.rglob("layerfuse-report.json")
    (only,) = json.loads(path.read_text())["modules"]["DeepseekV3ForCausalLM"]["graphs"]
    named = Counter(use["fused"] for use in only["uses"])
    assert (only["source"], only["tokens"], named[BLOCKS]) == ("module", "any", 8)
    assert named.keys() > {BLOCKS}, "norms and products that stand in modules are told in the same way"


@pytest.mark.parametrize(("mode", "run"), [("VLLM_COMPILE", "profiling run"), ("NONE", "first run")])
def test_a_micro_batch_beside_that_run_is_not_counted(mode: str, run: str, tmp_path: Path, said: Said) -> None:
    """Dual-batch overlap: while a batch waits for its experts another one goes on, in a thread of its own."""
    other: list[threading.Thread] = []

    def step(engine: Started) -> None:
        with torch.inference_mode():
            engine(4)

    def beside(_: Any) -> None:
        if not other:
            other.append(threading.Thread(target=step, args=(engine,)))
            other[0].start()
            other[0].join()

    with model(tmp_path, ALL, mode) as engine, mock.patch("vllm_started.before_attention", beside):
        engine(6)
    lines = [line for line in said() if "expected" in line]
    assert other and any(line.startswith(BLOCKS) for line in lines)
    for line in lines:
        sites = line.split(": ")[1].split()[0]
        assert line.endswith(f"{sites} fused, 0 missed; called {counted(int(sites), 'time')} in the {run}")
    assert not any(line.startswith("problem") for line in said())
    assert len([line for line in said() if line.startswith("layerfuse 0")]) == 1


def test_without_that_fusion_both_quantise_for_themselves(tmp_path: Path) -> None:
    with model(tmp_path, ADDS) as engine:
        assert given_to_vllm(engine, 3) == (0, {"group_quant_linear": 2})
        assert given_to_vllm(engine, 17) == (2, {"group_quant_linear": 2})


@pytest.mark.parametrize("fusions", ["none", ADD, f"-{BLOCKS}", f"{ADD}_group_quant"])
def test_they_go_with_the_quantised_fusions(fusions: str, tmp_path: Path, said: Said) -> None:
    with model(tmp_path, fusions) as engine:
        assert given_to_vllm(engine, 3) == (2, {})
    assert not any("shared experts" in line for line in said())


def with_lora(patch: pytest.MonkeyPatch) -> str:
    patch.setattr(shared_experts, "why_not", _with_lora(shared_experts.why_not))
    return "LoRA may add to them"


def _with_lora(why_not: Callable[..., Any]) -> Callable[..., Any]:
    def asked(config: Any, kernel: Any) -> Any:
        with mock.patch.object(config, "lora_config", object()):
            return why_not(config, kernel)

    return asked


def of_another_package(patch: pytest.MonkeyPatch) -> str:
    def product(self: Any, A: Tensor, B: Tensor, As: Tensor, Bs: Tensor) -> Tensor:
        return _own(self, A, B, As, Bs)

    patch.setattr(CLASS, PRODUCT, product)
    return f"{KERNELS.__name__}:{CLASS.__qualname__}.{PRODUCT} is not vLLM's own: it is from test_vllm_shared_experts"


def of_another_signature(patch: pytest.MonkeyPatch) -> str:
    patch.setattr(CLASS, PRODUCT, lambda self, A, B, As, Bs, C=None: _own(self, A, B, As, Bs))
    return f"{CLASS.__qualname__}.{PRODUCT} takes self, A, B, As, Bs, C, and not self, A, B, As, Bs"


def of_an_unknown_release(patch: pytest.MonkeyPatch) -> str:
    patch.setattr(shared_experts, "CLASS", ("vllm.elsewhere", "SharedExperts"))
    return "this vLLM runs them otherwise than by vllm.elsewhere.SharedExperts"


@pytest.mark.parametrize("change", [with_lora, of_another_package, of_another_signature, of_an_unknown_release])
def test_what_is_not_as_expected_is_left_alone_and_said(
    change: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    why = change(monkeypatch)
    with model(tmp_path, ADDS) as engine:
        assert not any(PRODUCT in vars(place) for place in kernels(engine))
        engine()
    (report,) = tmp_path.rglob("layerfuse-report.json")
    (module,) = json.loads(report.read_text())["modules"].values()
    rows = [row for row in module["sites"] if row["fusion"].startswith("few_token") and row["decision"] == "refused"]
    left = [row for row in rows if "shared_experts" in row["site"]]
    assert [(row["fusion"], row["reason"]) for row in left] == [(BLOCKS, why)] * 2


def test_a_product_that_is_patched_later_is_called(tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    with model(tmp_path, ADDS) as engine:
        of_another_package(monkeypatch)
        x = torch.rand(3, 256).bfloat16()
        seen.clear()
        shared_of(engine)(x)
        assert [whose for whose, _, _ in seen] == ["FlashInfer"] * 2
    gone = shared_experts.GONE.partition("%")[0]
    assert sum(line.startswith(gone) for line in said()) == 1


def test_weights_that_lie_otherwise_are_vllms(tmp_path: Path, said: Said) -> None:
    with model(tmp_path, ADDS) as engine:
        scale = shared_of(engine).gate_up_proj.weight_scale_inv
        scale.data = scale.data.t().contiguous().t()
        assert given_to_vllm(engine, 3) == (1, {"group_quant_linear": 1})
        engine()
    assert missed(BLOCKS, 4, 3, FIRST) in said()
    assert any(
        "gate_up_proj:linear: the first run did not come to its product, or its kernel" in line for line in said()
    )


def test_where_a_step_waits_for_the_host_all_of_it_is_vllms(tmp_path: Path) -> None:
    options = {"captured": 16, "split": True}
    with model(tmp_path, ALL, "VLLM_COMPILE", **options) as engine:
        assert given_to_vllm(engine, 17) == (2, {})
        assert given_to_vllm(engine, 16)[1]["group_quant_linear"] == 1
        with counting() as called:
            engine(17)
            assert not {*called} - {"quantise_group"}
            engine(16)
        assert called["silu_mul_group_quant_with_product"] == 1
