"""transformers' own `FP8Linear`: few tokens by layerfuse's op where that is named, more by transformers' function, and why not.

Its kernels come from the hub and need a GPU: a stand-in computes what they do (kernels-community/finegrained-fp8, matmul.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from quant_support import CPU_FP8
from torch import nn

from layerfuse import fusion, registry
from layerfuse.adapters.errors import ArgumentError
from layerfuse.engines.transformers import engine_of
from layerfuse.engines.transformers_facts import KEPT
from layerfuse.fusion import FusionConfig, FusionMissedError, Target, backends
from layerfuse.fusion.catalog.few_token_linear import BLOCKS, PLAIN
from layerfuse.fusion.ops.linear import dequantised
from layerfuse.fusion.ops.quantisation import quantise
from layerfuse.testing import small_model

transformers = pytest.importorskip("transformers")
finegrained = pytest.importorskip("transformers.integrations.finegrained_fp8")
FP8 = torch.float8_e4m3fn
NAMED = FusionConfig.parse(f"+{BLOCKS}", strict=True)
ALONE = FusionConfig.parse(BLOCKS, strict=True)
CPU = Target.named("cpu")
OWN = finegrained.fp8_linear

pytestmark = pytest.mark.usefixtures("_op_by_op", "hub")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """The hub's kernel, as it is called: tokens -> calls. transformers' module is put back afterwards."""
    calls: Counter[int] = Counter()

    def matmul(x: Any, weight: Any, scales: Any, block: Any, dtype: Any, activation_scale: Any = None) -> torch.Tensor:
        assert x.is_contiguous() and list(block) == [128, 128] and activation_scale is None
        calls[x.shape[:-1].numel()] += 1
        values, of_rows = quantise(x.reshape(-1, x.shape[-1]).float(), FP8, 128, False, False)
        made = dequantised(values, of_rows, 1) @ dequantised(weight, scales, 128).t()
        return made.to(dtype).view(*x.shape[:-1], len(weight))

    monkeypatch.setattr(finegrained, "load_finegrained_fp8_kernel", lambda: SimpleNamespace(matmul=matmul))
    monkeypatch.setattr(finegrained, "fp8_linear", OWN)
    return calls


def quantised(model: Any, kept: tuple[str, ...] = ("lm_head", "experts"), **config: Any) -> Any:
    """A model in fp8 as transformers loads one, with the numbers that it had."""
    plain = {path: each for path, each in model.named_modules() if isinstance(each, nn.Linear)}
    finegrained.replace_with_fp8_linear(model, [*kept], transformers.FineGrainedFP8Config(**config), True)
    for path, linear in model.named_modules():
        if isinstance(linear, finegrained.FP8Linear):
            fill(linear, plain[path].weight.detach())
    return model.eval().requires_grad_(False)


def fill(linear: Any, weight: torch.Tensor) -> None:
    """Give an FP8Linear a weight (columns, depth), with scales that differ."""
    scales = torch.linspace(1e-3, 2e-3, linear.weight_scale_inv.numel()).view(linear.weight_scale_inv.shape)
    wide = scales if scales.dim() == 0 else scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    values = weight.float() / (wide if wide.dim() == 0 else wide[: weight.shape[0], : weight.shape[1]])
    linear.weight = nn.Parameter(values.clamp(-448, 448).to(FP8), requires_grad=False)
    linear.weight_scale_inv = nn.Parameter(scales, requires_grad=False)
    if linear.bias is not None:
        linear.bias = nn.Parameter(torch.linspace(-1, 1, len(weight)).bfloat16(), requires_grad=False)


def named(name: str, layers: Any = 2) -> Any:
    """A declared model, small."""
    return small_model(registry.model(name), layers=layers, hidden_size=256, heads=2, dtype=torch.bfloat16)


def llama(layers: int = 2) -> Any:
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=384, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, attention_bias=True,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def linears(model: Any) -> set[str]:
    return {path for path, each in model.named_modules() if isinstance(each, finegrained.FP8Linear)}


def call(model: Any, tokens: int = 5) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(tokens)[None], use_cache=False).logits.float()


def compiled(model: Any, config: FusionConfig = NAMED, target: Target = CPU, **options: Any) -> Any:
    return fusion.compile(model, engine=engine_of(model), config=config, target=target, **options)


def reasons(
    model: Any, config: FusionConfig = NAMED, fused: str = BLOCKS, target: Target = CPU
) -> set[tuple[str, str]]:
    """What a plan says of a fusion at the linears that it does not take."""
    made = fusion.plan(registry.specs_in(model), target, config, engine_of(model))
    return {(each.kind, each.reason) for each in made.decisions if each.fusion == fused and each.tokens.first == 1}


@pytest.mark.parametrize(
    ("made", "absorbed", "backend"),
    [
        (lambda: named("qwen3-8b", 1), 0, "reference"),
        pytest.param(
            llama, 0, "reference", marks=pytest.mark.thorough
        ),  # its graph is the next one's, its backend the last one's
        (lambda: llama(1), 0, "triton"),
        (lambda: named("deepseek-v3", [0, 3]), 2, "reference"),
    ],
    indirect=["backend"],
    ids=["Qwen3", "Llama", "Llama-triton", "DeepSeek-V3"],
)
def test_every_fp8_linear_that_specs_list_is_the_op(
    made: Callable[[], Any], absorbed: int, hub: Counter[int], backend: str
) -> None:
    """`absorbed`: MLA's second projections of the key/value latent, which are no sites and stay transformers'."""
    model = quantised(made())
    wanted, every = call(model), linears(model)
    fused = compiled(model)
    hub.clear()
    with backends.counting() as ran:
        call(fused)
    assert ran["group_quant_linear"] == len(every) - absorbed and hub.total() == absorbed
    # Alone: norms that round less often move what the linears round to eight bits. Triton's interpreter rounds to fp8 as no hardware does.
    apart = call(compiled(model, ALONE)) - wanted
    assert apart.norm() <= (1e-2 if backend == "reference" else 5e-2) * wanted.norm()
    verdict = fused.report.of(BLOCKS)
    assert verdict.expected == verdict.matched and verdict.last_call == len(every) - absorbed
    assert {site.removesuffix(":linear") for site in verdict.matched} == {
        path for path in every if not path.endswith("kv_b_proj")
    }
    audit = fused.audit(input_ids=torch.arange(5)[None], use_cache=False)
    assert audit.ok and audit.fusions[BLOCKS].profiled == len(every) - absorbed, str(audit)


def test_more_tokens_are_transformers_function_in_the_same_graph(hub: Counter[int]) -> None:
    model = quantised(named("qwen3-8b"))
    fused, several = compiled(model, ALONE, dynamic=True), len(linears(model))
    hub.clear()
    for tokens in (5, 16, 17, 40):
        wanted = call(model, tokens)
        hub.clear()
        assert (call(fused, tokens) - wanted).norm() <= 2e-2 * wanted.norm()
        assert hub == ({tokens: several} if tokens > 16 else {})


def test_it_is_on_by_its_name_and_so_are_those_of_16_bits() -> None:
    model = quantised(named("qwen3-8b"), kept=("lm_head", "model.layers.0", "up_proj"))
    off = compiled(model, FusionConfig(strict=True))
    call(off)
    assert not {use.fused for record in off.report.records for use in record.uses} & {BLOCKS, PLAIN}
    both = compiled(model, FusionConfig.parse(f"+{BLOCKS},+{PLAIN}", strict=True))
    call(both)
    assert (both.report.of(BLOCKS).last_call, both.report.of(PLAIN).last_call) == (6, 8)
    assert reasons(model, FusionConfig(), PLAIN) >= {("refused", f"{PLAIN} is on by its own name alone")}


def test_what_quantises_in_front_has_no_place_there() -> None:
    model = quantised(llama())
    config = FusionConfig(level=2, strict=True)
    for name in ("add_rms_norm_group_quant", "silu_mul_group_quant"):
        assert ("not_applicable", KEPT) in reasons(model, config, name, CPU_FP8)
    fused = compiled(model, config, CPU_FP8)
    call(fused)
    assert fused.report.of("add_rms_norm").last_call == 4


# ---- what stands in the place of transformers' function


def one(**words: Any) -> Any:
    """One linear of 256 by 256 columns."""
    linear = finegrained.FP8Linear(256, 256, **({"block_size": (128, 128)} | words))
    fill(linear, torch.rand(256, 256) - 0.5)
    return linear


def test_without_a_graph_and_in_an_exported_one_it_is_transformers_function(
    hub: Counter[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    linear = one(has_bias=True).requires_grad_(False)
    x = torch.rand(3, 256).bfloat16()
    wanted = linear(x)
    engine_of(linear)
    assert finegrained.fp8_linear is not OWN
    hub.clear()
    assert torch.equal(linear(x), wanted) and hub == {3: 1}
    monkeypatch.setattr(finegrained, "finegrained_fp8_linear", lambda x, weight, *_: x @ weight.to(x.dtype).t())
    with torch.no_grad():
        for strict in (False, True):
            assert "layerfuse" not in str(torch.export.export(linear, (x,), strict=strict).graph)


def test_what_dynamo_traces_through_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' function in the place of ours, and a kernel of plain torch: a graph holds all of it, and no product that is known."""
    fused = compiled(quantised(llama(1)), ALONE)
    monkeypatch.setattr(finegrained, "fp8_linear", lambda x, weight, *_, **__: x @ weight.to(x.dtype).t())
    with pytest.raises(FusionMissedError, match="in none of the 1 compiled graph; other ops multiply there"):
        call(fused)


def test_whoever_compiles_gets_one_op_with_the_same_result(hub: Counter[int]) -> None:
    for flag in (False, True):
        linear = one(has_bias=True).requires_grad_(False)
        linear._deepgemm_disabled = flag
        x = torch.rand(3, 256).bfloat16()
        wanted = linear(x)
        engine_of(linear)
        graphs: list[str] = []

        def keep(gm: Any, _: Any, kept: list[str] = graphs) -> Any:
            kept.append(str(gm.graph))
            return gm

        torch._dynamo.reset()
        assert torch.equal(torch.compile(linear, backend=keep, fullgraph=True)(x), wanted)
        assert ("fp8_linear_without_deepgemm" in graphs[0]) is flag and "layerfuse_transformers.fp8_linear" in graphs[0]


def test_gradients_of_what_is_read_are_transformers() -> None:
    linear = one().requires_grad_(False)
    engine_of(linear)
    grads = []
    for function in (linear, torch.compile(linear, backend="aot_eager")):
        x = torch.ones(3, 256, dtype=torch.bfloat16, requires_grad=True)
        function(x).sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads) and grads[0].any()


def other_numbers(*given: Any, **named: Any) -> torch.Tensor:
    return 1.5 * OWN(*given, **named)


def other_arguments(input: Any, weight: Any, weight_scale: Any) -> Any:  # noqa: A002
    return input @ weight.t()


def wrapped(
    input: Any,  # noqa: A002
    weight: Any,
    weight_scale_inv: Any,
    block_size: Any = None,
    bias: Any = None,
    activation_scale: Any = None,
    allow_deepgemm: bool = True,
) -> Any:
    return OWN(input, weight, weight_scale_inv, block_size, bias, activation_scale, allow_deepgemm)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (other_arguments, "fp8_linear, from test_transformers_fp8, is expected to take input, weight, weight_scale_inv"),
        (other_numbers, "fp8_linear, from test_transformers_fp8, is expected to take input"),
        (wrapped, "fp8_linear is from test_transformers_fp8"),
    ],
)  # fmt: skip
def test_a_function_that_is_not_transformers_stays(function: Any, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantised(llama())
    monkeypatch.setattr(finegrained, "fp8_linear", function)
    ((kind, reason),) = reasons(model)
    assert kind == "refused" and why in reason
    assert finegrained.fp8_linear is function


def no_kernel() -> Any:
    raise ImportError("finegrained-fp8 kernel unavailable")


@pytest.mark.parametrize(
    ("kernel", "why"),
    [
        (no_kernel, "trying out what runs there raised ImportError: finegrained-fp8 kernel unavailable"),
        (lambda: SimpleNamespace(matmul=lambda x, weight, *_, **__: 3 * x[:, :1].expand(-1, len(weight))), "its results are off by"),
    ],
)  # fmt: skip
def test_kernels_that_are_missing_or_compute_something_else(
    kernel: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = quantised(llama())
    monkeypatch.setattr(finegrained, "load_finegrained_fp8_kernel", kernel)
    assert reasons(model) and all(kind == "refused" and why in reason for kind, reason in reasons(model))


def test_it_is_tried_out_in_the_dtype_that_the_model_computes_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel may give one dtype for every other, and a graph was promised the model's own."""
    matmul = finegrained.load_finegrained_fp8_kernel().matmul
    always = SimpleNamespace(matmul=lambda *given, **named: matmul(*given, **named).bfloat16())
    monkeypatch.setattr(finegrained, "load_finegrained_fp8_kernel", lambda: always)
    for dtype, refused in ((torch.bfloat16, False), (torch.float16, True)):
        left = engine_of(nn.ModuleDict({"norm": nn.LayerNorm(256, dtype=dtype), "a": one()})).linears
        assert left == ({"a": "what runs there gives torch.bfloat16 for rows of torch.float16"} if refused else {})


class OfAnotherForward(finegrained.FP8Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def on_meta() -> Any:
    with torch.device("meta"):
        return finegrained.FP8Linear(256, 256, block_size=(128, 128))


@pytest.mark.parametrize(
    ("linear", "why"),
    [
        (one, None),
        (lambda: one(block_size=None), "its weight is not in e4m3fn"),
        (lambda: one(block_size=(64, 128)), "its weight is not in e4m3fn"),
        (lambda: one(scale_fmt="ue8m0"), None),
        (lambda: one(activation_scheme="static"), "its weight is not in e4m3fn"),
        (lambda: OfAnotherForward(256, 256, block_size=(128, 128)), "the forward of its class, OfAnotherForward,"),
        (on_meta, "its weight is not loaded"),
        (lambda: finegrained.FP8GroupedLinear(256, 256, 2, block_size=(128, 128)), "the forward of its class"),
    ],
)
def test_why_one_linear_is_left(linear: Callable[[], Any], why: str | None) -> None:
    left = engine_of(nn.ModuleDict({"a": linear()})).linears
    assert (left == {}) if why is None else (left is not None and [*left] == ["a"] and why in left["a"])


def test_what_is_expected_and_not_as_the_kernel_reads_it_is_missed() -> None:
    model = quantised(llama())
    engine = engine_of(model)
    linear = model.model.layers[1].mlp.up_proj
    linear.weight = nn.Parameter(linear.weight.t().contiguous().t(), requires_grad=False)
    fused = fusion.compile(model, engine=engine, config=NAMED, target=CPU)
    with pytest.raises(FusionMissedError, match="does not read this weight"):
        call(fused)


def test_a_model_without_such_linears_and_no_model() -> None:
    engine = engine_of(named("qwen3-8b"))
    assert engine.linears == {} and engine.keeps == {} and finegrained.fp8_linear is OWN
    with pytest.raises(ArgumentError, match="model"):
        engine_of("qwen3")  # type: ignore[arg-type]
