"""Layers that change while their paths stay: the plan is made anew before the next compilation, and strict holds to it.

The graphs are run op by op instead of by generated code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from quant_support import CPU_FP8, dequantise, vllm_per_token
from ranks import run_on_ranks
from torch import nn

from layerfuse import fusion
from layerfuse.adapters.errors import MissingAttributeError
from layerfuse.fusion import FusedModel, FusionConfig, FusionMissedError

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("_op_by_op")

ADD, QUANT, HEADS = "add_rms_norm", "add_rms_norm_per_token_quant", "qk_norm_rope"
IDS = {"input_ids": torch.arange(6)[None], "use_cache": False}


def qwen3(layers: int = 1) -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=64,
    )  # fmt: skip
    return transformers.Qwen3ForCausalLM(config).eval()


def call(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**IDS).logits


def expected(fused: FusedModel) -> Counter[str]:
    return Counter(decision.fusion for decision in fused.plan.expected())


def ran(fused: FusedModel) -> Counter[str]:
    assert fused.report.last is not None
    counts: Counter[str] = Counter()
    for (_, name), count in fused.report.last.ran.items():
        counts[name] += count
    return counts


def assert_as_planned_afresh(fused: FusedModel, tolerance: float = 1e-5) -> None:
    """The next call runs what a new plan of the model as it is now expects, and gives the model's numbers."""
    wanted = call(fused.original)
    assert (call(fused) - wanted).abs().max() <= tolerance * wanted.abs().max()
    asked = fused._arguments["asked"]
    arguments = {name: getattr(asked, name) for name in ("target", "config", "engine", "registry", "parallel")}
    assert expected(fused) == ran(fused) == expected(fusion.compile(fused.original, **arguments))
    fused.report.check()


# ---- another epsilon: dynamo guards on it, as an attribute and in another module


def another_norm(model: Any) -> None:
    layer = model.model.layers[-1]
    layer.post_attention_layernorm = type(layer.post_attention_layernorm)(64, 1e-3)


def another_attribute(model: Any) -> None:
    model.model.layers[-1].post_attention_layernorm.variance_epsilon = 1e-3


def another_dtype(model: Any) -> None:
    model.bfloat16()


def weights_of_others(model: Any) -> None:
    model.load_state_dict({name: torch.rand_like(held) for name, held in model.state_dict().items()}, assign=True)


@pytest.mark.parametrize(
    "change",
    [
        another_norm,
        pytest.param(another_attribute, marks=pytest.mark.thorough),  # the epsilon that comes back is one
        another_dtype,
        weights_of_others,
    ],
    ids=lambda f: f.__name__,
)
def test_a_change_of_layers_is_planned(change: Callable[[Any], None]) -> None:
    fused = fusion.compile(qwen3(), strict=True)
    call(fused)
    change(fused.original)
    assert_as_planned_afresh(fused, 2e-2 if change is another_dtype else 1e-5)


def test_a_change_where_layers_are_compiled_by_themselves() -> None:
    model = qwen3(layers=2)
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(lambda *_: torch._dynamo.graph_break())
    fused = fusion.compile(model)
    call(fused)
    before, graphs = ran(fused), fused.report.graphs
    another_norm(model)
    call(fused)
    assert ran(fused) == before
    assert fused.plan.specs == fusion.compile(model).plan.specs
    assert fused.report.graphs < 2 * graphs, "what did not change is not compiled again"


def test_an_epsilon_that_comes_back() -> None:
    fused = fusion.compile(qwen3(), strict=True)
    norm = fused.model.layers[0].post_attention_layernorm
    for epsilon in (1e-6, 1e-3, 1e-6, 1e-3):
        norm.variance_epsilon = epsilon
        assert_as_planned_afresh(fused)
    # Dynamo still had the graphs: nothing was compiled again.
    assert fused.report.graphs == 2


# ---- quantised in place


class OnTheCPU(transformers.integrations.finegrained_fp8.FP8Linear):
    """transformers' linear, whose kernels run on GPUs only: the same arithmetic."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values, scales = vllm_per_token(x)
        return nn.functional.linear(dequantise(values, scales).to(x.dtype), self.weight.to(x.dtype))


def quantise(model: Any) -> None:
    for layer in model.model.layers:
        for holder in (layer.self_attn, layer.mlp):
            for name, linear in list(holder.named_children()):
                if isinstance(linear, nn.Linear):
                    taken = OnTheCPU(linear.in_features, linear.out_features)
                    taken.weight.data = (linear.weight * 8).to(taken.weight.dtype)
                    setattr(holder, name, taken)


def test_linears_that_are_quantised_after_compile() -> None:
    fused = fusion.compile(qwen3(), target=CPU_FP8, config=FusionConfig(level=2), strict=True)
    call(fused)
    assert expected(fused) == {ADD: 2, HEADS: 1}
    quantise(fused.original)
    with torch.no_grad():
        audit = fused.audit(**IDS)
    assert {name: found.expected for name, found in audit.fusions.items()} == dict(expected(fused))
    assert audit.ok, str(audit)
    assert_as_planned_afresh(fused, 5e-2)
    assert expected(fused)[QUANT] == 1
    assert fused.report.of(QUANT).last_call == 1


# ---- sharded by a mesh of devices


def parallelised(_rank: int) -> tuple[Counter[str], Counter[str], Counter[str], float]:
    import torch._inductor.compile_fx as inductor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    inductor.compile_fx_inner = lambda gm, _inputs, **_: gm
    model = qwen3()
    fused = fusion.compile(model, strict=True)
    wanted = call(fused)
    before = expected(fused)
    columns, rows = ("q_proj", "k_proj", "v_proj"), ("o_proj",)
    mlp = {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    attention = {f"self_attn.{name}": ColwiseParallel() for name in columns} | {
        f"self_attn.{name}": RowwiseParallel() for name in rows
    }
    mesh = torch.distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for layer in model.model.layers:
        parallelize_module(layer, mesh, attention | mlp)
    error = (call(fused) - wanted).abs().max()
    return before, expected(fused), ran(fused), float(error)


def test_a_model_that_is_sharded_after_compile() -> None:
    for before, after, counted, error in run_on_ranks(parallelised, 2):
        assert before == {ADD: 2, HEADS: 1}
        assert after == counted == {"all_reduce_add_rms_norm": 2, HEADS: 1}
        assert error < 1e-5


# ---- what can no longer be read


class UnknownAttention(nn.Module):
    """Of a class that no adapter knows; its decoder layer is read as before."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.layer_idx, self.config, self.o_proj = inner.layer_idx, inner.config, inner.o_proj

    def forward(self, hidden_states: torch.Tensor, **_: object) -> tuple[torch.Tensor, None]:
        return self.o_proj(hidden_states), None


@pytest.mark.parametrize("disabled", [False, True])
def test_an_attention_of_an_unknown_class(disabled: bool) -> None:
    model = qwen3()
    (layer,) = model.model.layers
    inner = layer.self_attn
    if disabled:
        inner.forward = torch.compiler.disable(inner.forward)
    fused = fusion.compile(model, strict=not disabled)
    call(fused)
    layer.self_attn = UnknownAttention(inner)
    if disabled:
        call(fused)
    else:
        with pytest.raises(FusionMissedError, match=r"model.layers.0.self_attn: .*:UnknownAttention"):
            call(fused)
    assert fused.report.unknown == {"model.layers.0.self_attn": f"{__name__}:UnknownAttention"}
    layer.self_attn = inner
    torch._dynamo.reset()
    call(fused)
    assert fused.report.unknown == {}


def test_a_layer_that_can_no_longer_be_read_is_named() -> None:
    fused = fusion.compile(qwen3())
    call(fused)
    (layer,) = fused.model.layers
    layer.self_attn = nn.Identity()
    layer.forward = lambda hidden_states, **_: hidden_states
    with pytest.raises(MissingAttributeError, match=r"model\.layers\.0 .* does not say its layer_index"):
        call(fused)


def test_given_specs_stay() -> None:
    model = qwen3()
    given = fusion.compile(model).plan.specs
    fused = fusion.compile(model, specs=given)
    call(fused)
    another_norm(model)
    call(fused)
    assert fused.plan.specs == given
    assert list(fused.report.of(ADD).missed) == ["model.layers.0:post_attention"]


def test_a_norm_of_a_norms_result_is_another_norm() -> None:
    """A head that norms what it reads: in float32 nothing stands between both norms."""
    model = qwen3()
    model.lm_head = nn.Sequential(nn.RMSNorm(64, eps=1e-6), model.lm_head)
    assert_as_planned_afresh(fusion.compile(model, strict=True))
