"""Routed experts, which vLLM's Triton kernels multiply behind an op of its own: few tokens are layerfuse's, or all are vLLM's, and it says why.

Run by `make test-engines` in an environment of its own.
"""

from __future__ import annotations

import gc
import inspect
import weakref
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("vllm_started")

import vllm.model_executor.layers.fused_moe.experts.triton_moe as vllm_experts
from torch import nn
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config
from vllm.model_executor.layers.fused_moe.experts.triton_deep_gemm_moe import TritonOrDeepGemmExperts
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

from layerfuse.engines import process
from layerfuse.engines.host import enter
from layerfuse.engines.native import native_methods
from layerfuse.engines.standing import counted
from layerfuse.engines.vllm import routed_experts
from layerfuse.engines.vllm.host import VLLM
from layerfuse.fusion import ops
from layerfuse.fusion.backends import counting
from layerfuse.fusion.catalog.few_token_linear import ROUTED
from layerfuse.fusion.ops.linear import block_scaled_experts

FP8 = torch.float8_e4m3fn
MANY, WIDTH, INNER, CHOICES = 6, 256, 128, 2
OP = "block_scaled_experts"


@pytest.fixture(autouse=True)
def _entered(monkeypatch: pytest.MonkeyPatch) -> None:
    enter(VLLM)
    monkeypatch.setattr(process.this, "said", set(), raising=False)


def config(**changes: Any) -> Any:
    fields = dict.fromkeys(
        ("swiglu_limit", "swiglu_alpha", "swiglu_beta", "activation_situ_beta", "activation_situ_linear_beta")
    )
    around = {"activation": MoEActivation.SILU, "moe_parallel_config": SimpleNamespace(use_ep=False)}
    return SimpleNamespace(**(fields | around | changes))


def scales(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) / 500


def experts_of(block: int = 128, **changes: Any) -> TritonExperts:
    """VLLM's own object, for experts of these sizes."""
    quant = fp8_w8a8_moe_quant_config(
        scales(MANY, 2 * INNER // 128, WIDTH // 128),
        scales(MANY, WIDTH // 128, INNER // 128),
        block_shape=[block, block],
    )
    return TritonExperts(config(**changes), quant)


class Method:
    """What holds these objects, and makes them of weights, as vLLM's does."""

    def __init__(self, experts: Any) -> None:
        self.hold(experts)

    def hold(self, experts: Any) -> None:
        self.moe_kernel = SimpleNamespace(impl=SimpleNamespace(fused_experts=experts))

    def process_weights_after_loading(self, _layer: nn.Module) -> None:
        self.hold(self.again())

    again: Any = None
    "Makes them when weights are loaded again."


def model_of(*several: Any) -> nn.Module:
    """A model whose layers multiply by these objects, as vLLM holds them."""
    model = nn.ModuleList(nn.Identity() for _ in several)
    for layer, experts in zip(model, several, strict=True):
        layer.quant_method = Method(experts)
    return model


@pytest.fixture
def vllms(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each call of vLLM's kernels, which plain torch stands for."""
    seen: list[int] = []

    def apply(
        self: Any, output: Any, hidden_states: Any, w1: Any, w2: Any, topk_weights: Any, topk_ids: Any, activation: Any,
        global_num_experts: Any, expert_map: Any, a1q_scale: Any, a2_scale: Any, workspace13: Any, workspace2: Any,
        expert_tokens_meta: Any, apply_router_weight_on_input: Any,
    ) -> None:  # fmt: skip
        seen.append(len(hidden_states))
        quant = self.quant_config
        block_scaled_experts(
            hidden_states,
            a1q_scale,
            w1,
            quant.w1_scale,
            w2,
            quant.w2_scale,
            topk_weights,
            topk_ids,
            output,
            False,
            True,
        )

    apply.__module__ = TritonExperts.__module__
    apply.__qualname__ = "TritonExperts.apply"
    monkeypatch.setattr(TritonExperts, "apply", apply)
    monkeypatch.setattr(routed_experts, "native_methods", lambda *_: native_methods())
    return seen


def given_of(tokens: int, **changes: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(tokens, WIDTH, generator=generator).bfloat16()
    values, scale = ops.quantise_group(x)
    return {
        "output": torch.full((tokens, WIDTH), float("nan"), dtype=torch.bfloat16),
        "hidden_states": values,
        "w1": (torch.randn(MANY, 2 * INNER, WIDTH, generator=generator) * 60).to(FP8),
        "w2": (torch.randn(MANY, WIDTH, INNER, generator=generator) * 60).to(FP8),
        "topk_weights": torch.rand(tokens, CHOICES, generator=generator),
        "topk_ids": torch.rand(tokens, MANY, generator=generator).argsort()[:, :CHOICES].int().contiguous(),
        "activation": MoEActivation.SILU,
        "global_num_experts": MANY,
        "expert_map": None,
        "a1q_scale": scale,
        "a2_scale": None,
        "workspace13": torch.empty(0),
        "workspace2": torch.empty(0),
        "expert_tokens_meta": None,
        "apply_router_weight_on_input": False,
    } | changes


CONFIG = SimpleNamespace(lora_config=None)


def why_not(experts: Any, config: Any = CONFIG) -> str | None:
    return routed_experts.why_not(config, model_of(experts))


def put_in(*several: Any, columns: int | None = None, untouched: range = range(0), strict: bool = False) -> Any:
    """A compiled module whose plan expects these experts to be layerfuse's, which is done."""
    model = model_of(*several)
    assert all(routed_experts.why_not(CONFIG, layer) is None for layer in model)
    spec = SimpleNamespace(local_intermediate_size=columns)
    sites = {
        f"{i}:experts": SimpleNamespace(name=f"{i}:experts", path=str(i), experts=spec) for i in range(len(several))
    }
    expected = tuple(SimpleNamespace(site=name) for name in sites)
    compiled = SimpleNamespace(
        plan=SimpleNamespace(site=sites, expected=lambda _: expected),
        placements={},
        untouched=untouched,
        config=CONFIG,
        strict=strict,
    )
    routed_experts.put_in(compiled, model)
    compiled.model = model
    return compiled


def taken(compiled: Any) -> int:
    """In how many layers they are layerfuse's, after a run with few tokens or many."""
    seam = compiled.placements[ROUTED]
    seam.ran = seam.calls()
    gone = {site for site, each in seam.standing.items() if each.why_not is not None}
    assert all(seam.standing[site].why_not == seam.why_left(site, "run") for site in gone)
    return len({use.site for use in seam.uses("run") if use.fused == ROUTED} - gone)


def called(experts: Any, tokens: int, **changes: Any) -> int:
    """Calls of layerfuse's op in one of vLLM's, whose result is right."""
    given = given_of(tokens, **changes)
    with counting() as calls:
        experts.apply(**given)
    right = torch.empty_like(given["output"])
    quant = experts.quant_config
    block_scaled_experts(
        given["hidden_states"], given["a1q_scale"], given["w1"], quant.w1_scale, given["w2"], quant.w2_scale, given["topk_weights"],
        given["topk_ids"], right, False, True,
    )  # fmt: skip
    assert torch.equal(given["output"], right)
    return calls[OP]


def test_few_tokens_are_layerfuses_once_both_ways_were_compared(vllms: list[int]) -> None:
    first, second = experts_of(), experts_of()
    compiled = put_in(first, second)
    assert taken(compiled) == 0
    assert called(first, 40) == 1 and vllms == [2, 40]
    vllms.clear()
    assert [called(first, tokens) for tokens in (1, 2, 3)] == [1, 1, 0] and vllms == [3]
    assert taken(compiled) == 1
    called(second, 20)
    assert taken(compiled) == 2


def test_wider_experts_are_for_one_token(vllms: list[int]) -> None:
    put_in(experts := experts_of(), columns=512)
    called(experts, 40)
    assert vllms == [1, 40]
    assert [called(experts, tokens) for tokens in (1, 2)] == [1, 0] and vllms == [1, 40, 2]


def test_they_are_compared_in_the_run_that_is_looked_at(vllms: list[int]) -> None:
    compiled = put_in(experts := experts_of(), untouched=range(9, 100))
    for tokens, trials in ((40, []), (8, [2])):
        vllms.clear()
        with counted(compiled):
            called(experts, tokens)
        assert vllms == [*trials, tokens]
    (use,) = compiled.placements[ROUTED].uses("run")
    assert use.fused == ROUTED and compiled.counted[OP] == 1


def test_what_chooses_deep_gemm_for_many_tokens_is_vllms() -> None:
    both = object.__new__(TritonOrDeepGemmExperts)
    both.fallback_experts = experts_of()
    assert "does not multiply its routed experts by TritonExperts" in (why_not(both) or "")


@pytest.mark.parametrize(
    "changes",
    [
        {"apply_router_weight_on_input": True},
        {"activation": MoEActivation.GELU},
        {"expert_map": torch.arange(MANY)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_other_calls_are_vllms(changes: dict[str, Any], vllms: list[int]) -> None:
    experts = experts_of()
    put_in(experts)
    called(experts, 20)
    vllms.clear()
    assert called(experts, 2, **changes) == 0 and vllms == [2]
    assert called(experts, 2) == 1


@pytest.mark.parametrize("other", [{"block": 64}, {"swiglu_limit": 7.0}, {"activation": MoEActivation.GELU}], ids=str)
def test_other_experts_are_vllms(other: dict[str, Any]) -> None:
    assert "its experts are not in fp8 with scales in blocks of 128 x 128" in (why_not(experts_of(**other)) or "")


def test_other_kernels_are_vllms() -> None:
    other = "vLLM does not multiply its routed experts by TritonExperts, its Triton kernels"
    assert routed_experts.why_not(CONFIG, nn.Linear(2, 2)) == why_not(SimpleNamespace()) == other


def test_expert_parallelism_is_vllms() -> None:
    sharded = experts_of(moe_parallel_config=SimpleNamespace(use_ep=True))
    assert why_not(sharded) == "with expert parallelism a rank holds some of them alone"


def test_lora_on_them_is_vllms() -> None:
    assert why_not(experts_of(), SimpleNamespace(lora_config=object())) == "LoRA may add to them"


def test_what_computes_something_else_is_left_alone(vllms: list[int]) -> None:
    experts = experts_of()
    compiled = put_in(experts)
    own = TritonExperts.apply

    def doubled(self: Any, **given: Any) -> None:
        own(self, **given)
        given["output"].mul_(2)

    with mock.patch.object(TritonExperts, "apply", doubled):
        given = given_of(20)
        experts.apply(**given)
    assert taken(compiled) == 0
    vllms.clear()
    assert called(experts, 2) == 0 and vllms == [2]


def test_no_graph_is_captured_before_both_were_compared(vllms: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    experts = experts_of()
    put_in(experts)
    monkeypatch.setattr(routed_experts, "possible", lambda: False)
    assert called(experts, 2) == 0 and vllms == [2]
    monkeypatch.setattr(routed_experts, "possible", lambda: True)
    called(experts, 20)
    vllms.clear()
    assert called(experts, 2) == 1 and not vllms


def test_a_call_without_tokens_decides_nothing(vllms: list[int]) -> None:
    experts = experts_of()
    unit = put_in(experts)
    assert called(experts, 0) == 0
    called(experts, 20)
    assert taken(unit) == 1


def test_scales_that_are_rounded_where_vllm_does_not_are_seen(
    vllms: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = experts_of()
    unit = put_in(experts)
    own = ops.block_scaled_experts

    def weighed(*args: Any) -> None:
        args = list(args)
        args[6] = args[6] * 1.1
        own(*args)

    monkeypatch.setattr(routed_experts.Experts, "_ours", lambda self, given: weighed(*arguments(self, given)))
    called(experts, 20)
    assert taken(unit) == 0


def arguments(self: Any, given: dict[str, Any]) -> list[Any]:
    quant = self.experts.quant_config
    return [
        given["hidden_states"], given["a1q_scale"], given["w1"], quant.w1_scale, given["w2"], quant.w2_scale, given["topk_weights"],
        given["topk_ids"], given["output"], False, True,
    ]  # fmt: skip


def test_a_launch_that_fails_later_is_vllms_call(vllms: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    experts = experts_of()
    unit = put_in(experts)
    called(experts, 20)

    def failing(*_: Any) -> None:
        raise RuntimeError("out of resources")

    monkeypatch.setattr(routed_experts.Experts, "_ours", failing)
    vllms.clear()
    assert called(experts, 1) == 0 and vllms == [1] and taken(unit) == 0


def test_another_ones_apply_is_left_alone(vllms: list[int]) -> None:
    experts = experts_of()
    experts.apply = lambda **_: None
    assert why_not(experts) == "apply of this TritonExperts is another one's already"


def test_what_stands_stays_where_the_plan_is_made_anew(vllms: list[int]) -> None:
    experts = experts_of()
    put_in(experts)
    standing = vars(experts)["apply"]
    compiled = put_in(experts)
    assert vars(experts)["apply"] is standing
    called(experts, 20)
    assert taken(compiled) == 1


def test_what_stands_there_goes_with_vllms_object(vllms: list[int]) -> None:
    experts = experts_of()
    put_in(experts)
    alive = weakref.ref(experts)
    del experts
    gc.collect()
    assert alive() is None


def loaded_again(compiled: Any, *, changes: dict[str, Any] | None = None) -> Any:
    """The object that vLLM has made of the first layer's weights, loaded again in the way that its `reload_weights` does."""
    (layer, *_), again = compiled.model, experts_of(**(changes or {}))
    layer.quant_method.again = lambda: again
    layer.quant_method.process_weights_after_loading(layer)
    return again


def test_weights_that_are_loaded_again_are_layerfuses_too(vllms: list[int]) -> None:
    """vLLM makes the object anew each time: its scales are those that count."""
    compiled = put_in(first := experts_of())
    called(first, 40)
    for _ in range(2):
        again = loaded_again(compiled)
        again.quant_config.w1_scale.mul_(3)
        vllms.clear()
        assert called(again, 2) == 1 and not vllms, "and both ways are not compared once more"
        assert called(again, 3) == 0 and vllms == [3]
    assert taken(compiled) == 1
    gone = weakref.ref(first)
    del first
    gc.collect()
    assert gone() is None


def test_weights_that_are_loaded_again_in_another_form_are_vllms(
    vllms: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    compiled = put_in(first := experts_of())
    called(first, 40)
    again = loaded_again(compiled, changes={"swiglu_limit": 7.0})
    assert "apply" not in vars(again) and taken(compiled) == 0
    (said,) = [each.getMessage() for each in caplog.records if "from now on" in each.getMessage()]
    assert said == routed_experts.GONE % compiled.placements[ROUTED].standing["0:experts"].why_not
    assert "its weights were loaded again, and its experts are not in fp8 with scales" in said


@pytest.mark.parametrize("step", ["_fits", "_experts_in", "native_methods"])
def test_what_goes_wrong_where_weights_are_loaded_again_leaves_the_layer_to_vllm_and_stops_where_it_is_strict(
    step: str, vllms: list[int], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled, strict = put_in(first := experts_of()), put_in(experts_of(), strict=True)
    called(first, 40)
    monkeypatch.setattr(routed_experts, step, mock.Mock(side_effect=AttributeError("no such field")))
    again = loaded_again(compiled)
    vllms.clear()
    assert called(again, 2) == 0 and vllms == [2] and taken(compiled) == 0
    (said,) = [each.getMessage() for each in caplog.records if "from now on" in each.getMessage()]
    assert said.endswith("its weights were loaded again, and looking at them raised AttributeError: no such field")
    with pytest.raises(AttributeError, match="no such field"):
        loaded_again(strict)


def test_an_object_that_cannot_be_stood_in_is_vllms(vllms: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = put_in(first := experts_of())
    called(first, 40)
    monkeypatch.setattr(routed_experts.Experts, "move_to", mock.Mock(side_effect=RuntimeError("no room")))
    again = loaded_again(compiled)
    assert "apply" not in vars(again) and taken(compiled) == 0


def test_vllm_makes_its_objects_where_weights_are_processed() -> None:
    """Those of fp8 checkpoints, in the release that is installed: what stands there is called as that method is, and the object is another one behind it."""
    from vllm.model_executor.layers.quantization.fp8 import Fp8MoEMethod

    method, made = object.__new__(Fp8MoEMethod), Fp8MoEMethod.process_weights_after_loading
    assert [*inspect.signature(made).parameters] == ["self", "layer"]
    layer, kernels = mock.MagicMock(), [object(), object()]
    method.block_quant, method.weight_scale_name, method.quant_config = True, "weight_scale_inv", mock.Mock()
    method.moe_quant_config = method.fp8_backend = method.moe = method.experts_cls = mock.Mock()
    with (
        mock.patch(f"{Fp8MoEMethod.__module__}.convert_to_fp8_moe_kernel_format", return_value=(None,) * 4),
        mock.patch(f"{Fp8MoEMethod.__module__}.replace_parameter"),
        mock.patch.object(Fp8MoEMethod, "get_fused_moe_quant_config"),
        mock.patch(f"{Fp8MoEMethod.__module__}.make_fp8_moe_kernel", side_effect=kernels),
    ):
        for kernel in kernels:
            method.process_weights_after_loading(layer)
            assert method.moe_kernel is kernel


def test_vllms_own_code_is_what_is_known() -> None:
    """In the release that is installed, down to all that it calls."""
    assert vllm_experts.TritonExperts.apply.__module__ == routed_experts.APPLY.module
    assert native_methods((experts_of(), "apply")).changed() is None
    assert routed_experts.native_rounds()() in (False, True)
