"""Linears as sites: each that specs list once, with what it is and where it stands; and the fusions of their products in plans."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
import transformers
from torch import nn

from layerfuse import registry
from layerfuse.adapters import ActivationQuant
from layerfuse.adapters.linear_specs import linear_spec, weight_spec
from layerfuse.adapters.specs import WHOLE, AnySpec, MLPSpec, ResidualSpec
from layerfuse.fusion import FUSIONS, Engine, FusionConfig, Plan, Target, plan
from layerfuse.fusion.catalog.few_token_linear import BLOCKS, ELSEWHERE, PLAIN, ROUTED, ROWS
from layerfuse.fusion.compiler import inductor_with
from layerfuse.fusion.compose import op_of
from layerfuse.fusion.live_plan import module_index_of
from layerfuse.fusion.report import GraphRecord, Report
from layerfuse.fusion.rewrite import Pipeline
from layerfuse.fusion.sites import LINEAR, linear_sites, stack_of
from layerfuse.testing.op_inputs import arguments_of

SM90 = Target.named("sm90")
ENGINE = Engine(name="vllm", linears={}, inside=None)
BLOCK = weight_spec("float8_e4m3fn", "block", (128, 128))
INSIDE = ActivationQuant.parse("group128,tma_aligned,inside")


@pytest.fixture(scope="module")
def specs() -> list[tuple[str, AnySpec]]:
    """Two layers of DeepSeek-V3 in transformers: a dense one and a mixture."""
    config = transformers.DeepseekV3Config(
        hidden_size=256, intermediate_size=256, moe_intermediate_size=128, num_hidden_layers=2, first_k_dense_replace=1,
        num_attention_heads=4, num_key_value_heads=4, q_lora_rank=128, kv_lora_rank=64, qk_rope_head_dim=16,
        qk_nope_head_dim=32, v_head_dim=32, n_routed_experts=8, n_group=2, topk_group=1, num_experts_per_tok=2, vocab_size=64,
    )  # fmt: skip
    with torch.device("meta"):
        return list(registry.specs_in(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)))


def in_fp8(spec: Any, quant: ActivationQuant) -> Any:
    """A spec whose linears are fp8 in blocks."""
    changed: dict[str, Any] = {}
    for field in attrs.fields(type(spec)):
        held = getattr(spec, field.name)
        if field.name in ("consumers", "producers", "gives"):
            changed[field.name] = tuple(attrs.evolve(each, weight=BLOCK, activation=quant) for each in held)
        elif field.name.endswith(("norms", "norm")) and held:
            several = isinstance(held, tuple)
            norms = tuple(attrs.evolve(in_fp8(each, quant), quant=quant) for each in (held if several else (held,)))
            changed[field.name] = norms if several else norms[0]
        elif field.name == "quant":
            changed["quant"] = quant
    return attrs.evolve(spec, **changed)


def decided(made: Plan, fusion: str) -> dict[str, tuple[str, str]]:
    """Linear -> the first decision on a fusion, and its reason."""
    found: dict[str, tuple[str, str]] = {}
    for each in made.decisions:
        if each.fusion == fusion:
            found.setdefault(each.site.removesuffix(":linear"), (each.kind, each.reason))
    return found


def test_each_linear_that_was_read_is_one_site(specs: list[tuple[str, AnySpec]]) -> None:
    sites = list(linear_sites(specs, {}, stack_of(specs), True))
    attention = {"q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "o_proj"}  # the projection behind the latent is absorbed
    mlp = {"gate_proj", "up_proj", "down_proj"}
    expected = {f"model.layers.{i}.self_attn.{name}:linear" for i in range(2) for name in attention}
    expected |= {f"model.layers.0.mlp.{name}:linear" for name in mlp}
    shared = {f"model.layers.1.mlp.shared_experts.{name}:linear" for name in mlp}
    assert sorted(site.name for site in sites) == sorted(expected | shared)
    assert {site.name for site in sites if site.experts is not None} == shared
    assert all(site.role == LINEAR and not site.consumers for site in sites)


@pytest.mark.parametrize(
    ("model", "several"),
    # Attention of MLA has three, of grouped queries and a delta net two, an MLP two; LongCat-Flash has two of each in a layer.
    [
        *(("deepseek-v3", 61 * 3 + 61 * 2), ("qwen3-8b", 36 * 2 + 36 * 2), ("longcat-flash", 28 * 2 * 3 + 28 * 2 * 2)),
        *(("qwen3-next-80b-a3b", 48 * 2 + 48 * 2), ("kimi-linear-48b-a3b", 27 * 2 + 20 * 2 + 7 * 3)),
    ],
)
def test_declared_layers_have_those_that_engines_make_of_them(model: str, several: int) -> None:
    found = [*registry.model(model).specs(published=True)]
    sites = list(linear_sites(found, {}, stack_of(found), False))
    assert len(sites) == len({site.name for site in sites}) == several


def test_declared_linears_have_the_sizes_of_what_engines_merge() -> None:
    found = [*registry.model("qwen3-8b").specs(tp=2)]
    sizes = {
        site.linear.path: (
            (site.linear.in_features, site.linear.local_in_features),
            (site.linear.out_features, site.linear.local_out_features),
        )
        for site in linear_sites(found, {}, stack_of(found), False)
        if site.linear is not None
    }
    assert sizes == {
        "qkv_proj": ((4096, 4096), (32 * 128 + 2 * 8 * 128, 16 * 128 + 2 * 4 * 128)),
        "o_proj": ((32 * 128, 16 * 128), (4096, 4096)),
        "gate_up_proj": ((4096, 4096), (2 * 12288, 2 * 6144)),
        "down_proj": ((12288, 6144), (4096, 4096)),
    }


def test_a_loaded_model_has_no_linears_but_those_that_were_read() -> None:
    """As an outside adapter gives its norms: with how they are quantised, and without what reads them."""
    found = [*registry.model("qwen3-8b").specs(published=True)]
    assert not list(linear_sites(found, {}, stack_of(found), True))
    assert any(site.linear for site in plan(found, SM90, None, ENGINE).sites)
    assert not any(site.linear for site in plan(found, SM90, None, attrs.evolve(ENGINE, loaded=True)).sites)


def test_block_fp8_goes_with_quantised_fusions_and_the_rest_by_name(specs: list[tuple[str, AnySpec]]) -> None:
    quantised = [(layer, in_fp8(spec, INSIDE)) for layer, spec in specs]
    for config in (FusionConfig.parse("all"), FusionConfig()):  # by default as the quantised norms are
        made = plan(quantised, SM90, config, ENGINE)
        assert {kind for kind, _ in decided(made, BLOCKS).values()} == {"expected"}
    assert {str(each.tokens) for each in made.expected(BLOCKS)} == {"up to 16 tokens"}
    said = "the product, with the quantisation in front of it unless a chain has done that, is "
    assert all(reason.startswith(said) for _, reason in decided(made, BLOCKS).values())
    assert set(decided(made, PLAIN).values()) == {
        (
            "not_applicable",
            "the linear's weight is float8_e4m3fn, one scale per block of 128 x 128; few_token_linear reads bfloat16 or float16",
        )
    }
    elsewhere = plan(quantised, Target.named("sm100"), FusionConfig.parse("all"), ENGINE)
    assert set(decided(elsewhere, BLOCKS).values()) == {("refused", ELSEWHERE)}
    for fusions in ("add_rms_norm", f"-{BLOCKS}", "none"):
        off = plan(quantised, SM90, FusionConfig.parse(fusions), ENGINE)
        why = f"{BLOCKS} is switched off by "
        assert {(kind, reason.startswith(why)) for kind, reason in decided(off, BLOCKS).values()} == {("refused", True)}
    plain = plan(specs, SM90, FusionConfig.parse("all"), ENGINE)
    assert not plain.expected(PLAIN)
    named = plan(specs, SM90, FusionConfig.parse(f"+{PLAIN}"), attrs.evolve(ENGINE, experts="nobody sees them"))
    kinds = decided(named, PLAIN)
    assert {path for path, (kind, _) in kinds.items() if kind == "expected"} == {p for p in kinds if "shared" not in p}
    assert {reason for path, (_, reason) in kinds.items() if "shared" in path} == {"nobody sees them"}


def test_large_weights_are_refused() -> None:
    config = transformers.LlamaConfig(hidden_size=8192, num_hidden_layers=1, intermediate_size=28672, vocab_size=64)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    quantised = [(layer, in_fp8(spec, INSIDE)) for layer, spec in registry.specs_in(model)]
    kinds = decided(plan(quantised, SM90, FusionConfig.parse("all"), ENGINE), BLOCKS)
    kind, why = kinds["model.layers.0.mlp.down_proj"]
    assert kind == "refused" and why.startswith("its weight is 8192 x 28672, and from ")
    assert kinds["model.layers.0.self_attn.o_proj"][0] == "expected"


def test_what_an_engine_keeps_is_refused_where_it_could_stand(specs: list[tuple[str, AnySpec]]) -> None:
    quantised = [(layer, in_fp8(spec, INSIDE)) for layer, spec in specs]
    kept = {"model.layers.0.self_attn.o_proj": "its kernel is a stranger's"}
    made = plan(quantised, SM90, FusionConfig.parse("all"), attrs.evolve(ENGINE, linears=kept))
    refused = {path: reason for path, (kind, reason) in decided(made, BLOCKS).items() if kind == "refused"}
    assert refused == kept
    assert decided(made, PLAIN)["model.layers.0.self_attn.o_proj"][0] == "not_applicable"


def test_what_nobody_takes_out_and_nothing_compiles_is_refused(specs: list[tuple[str, AnySpec]]) -> None:
    quantised = [(layer, in_fp8(spec, INSIDE)) for layer, spec in specs]
    config = FusionConfig.parse("all")
    foreign = plan(quantised, SM90, config, attrs.evolve(ENGINE, inside="it is another package's"))
    refused = [reason for _, reason in decided(foreign, BLOCKS).values()]
    assert len(refused) >= 5 and all("it is another package's" in reason for reason in refused)
    eager = plan(quantised, SM90, config, attrs.evolve(ENGINE, uncompiled="nothing is compiled"))
    expected = {path.rpartition(".")[2] for path, (kind, _) in decided(eager, BLOCKS).items() if kind == "expected"}
    left = {path.rpartition(".")[2] for path, (kind, _) in decided(eager, BLOCKS).items() if kind != "expected"}
    assert left == {"o_proj"}, "all others are behind a chain that quantises for them"
    assert "q_b_proj" in expected


def test_where_nothing_is_compiled_a_report_speaks_of_no_graphs(specs: list[tuple[str, AnySpec]]) -> None:
    quantised = [(layer, in_fp8(spec, INSIDE)) for layer, spec in specs]
    eager = attrs.evolve(ENGINE, uncompiled="nothing is compiled")
    made = Report(plan(quantised, SM90, FusionConfig.parse("all"), eager), at_modules=True)
    made.add(GraphRecord(graph=0, uses=()))
    reasons = {reason for sites in made.missed().values() for reason in sites.values()}
    assert reasons == {"nothing compiles the model, and no op was put in at this site before its first call"}


def test_one_alone_can_be_left_on(specs: list[tuple[str, AnySpec]]) -> None:
    """As `layerfuse bisect` asks."""
    quantised = [(layer, in_fp8(spec, INSIDE)) for layer, spec in specs]
    whole = FusionConfig.parse("all")
    one = "model.layers.0.self_attn.o_proj:linear", BLOCKS
    norms = {
        (each.site, each.fusion) for each in plan(quantised, SM90, whole, ENGINE).expected() if each.fusion != BLOCKS
    }
    for config, only in ((whole, {one, *norms}), (FusionConfig(), {one, *norms}), (FusionConfig(), {one})):
        made = plan(quantised, SM90, attrs.evolve(config, only=frozenset(only)), ENGINE)
        assert [(each.site, each.fusion) for each in made.expected(BLOCKS)] == [one]


@pytest.mark.parametrize("name", [PLAIN, BLOCKS, ROWS])
def test_the_step_written_out_is_its_op(name: str) -> None:
    for form in FUSIONS[name].forms:
        composed = op_of(form.op.name, form.chain)
        assert composed.schema == form.op.schema
        plain, blocks = name == PLAIN, name == BLOCKS
        weight = torch.rand(96, 256).to(torch.bfloat16 if plain else torch.float8_e4m3fn)
        scales = {
            "x_scale": torch.rand(3, 2 if blocks else 1),
            "weight_scale": torch.rand(1, 2) if blocks else torch.rand(96),
        }
        dtype = torch.float8_e4m3fn if any(each.name == "x_scale" for each in form.op.args) else torch.bfloat16
        given = arguments_of(form.op, (3,), 256, dtype, weight=weight, out_dtype=torch.bfloat16, **scales)
        torch.testing.assert_close(composed.reference(*given), form.op.reference(*given), rtol=0, atol=0)


class Linears(nn.Module):
    """Two linears that specs list, and one that no spec lists."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj, self.other = nn.Linear(64, 128), nn.Linear(128, 64, bias=False), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (tokens, 64)."""
        return self.other(self.down_proj(self.up_proj(x)))


def test_products_in_a_graph_are_those_of_the_plan() -> None:
    weight = weight_spec("bfloat16", "plain", None)
    up, down = (
        linear_spec(name, (name,), (width, width, out, out, (out,), "replicated"), weight, None, False)
        for name, width, out in (("up_proj", 64, 128), ("down_proj", 128, 64))
    )
    mlp = MLPSpec(
        hidden_size=64,
        layer_index=0,
        parallel=WHOLE,
        intermediate_size=128,
        local_intermediate_size=128,
        consumers=(up, down),
        activation="relu",
    )
    model = Linears().bfloat16()
    for name in (PLAIN, "silu_mul_group_quant"):
        made = plan([("", mlp)], Target.named("cpu"), FusionConfig.parse(f"+{name}"), Engine(name="vllm", linears={}))
        pipeline = Pipeline(made, around=module_index_of(model))
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=inductor_with(pipeline, model, lower=lambda graph, *_, **__: graph))
        with torch.no_grad():
            x = torch.rand(5, 64).bfloat16()
            torch.testing.assert_close(compiled(x), model(x), rtol=1.6e-2, atol=1.6e-2)
        (record,) = pipeline.report.records
        fused = [(use.site, use.fused, use.form) for use in record.uses]
        assert fused == ([(f"{at}:linear", PLAIN, PLAIN) for at in ("up_proj", "down_proj")] if name == PLAIN else [])
        assert not record.others


class Scaled(nn.Module):
    """As torchao multiplies: torch's own product, of values and a weight with scales of whole rows."""

    def __init__(self, dtype: torch.dtype, fast: bool, channels: bool, bias: bool) -> None:
        super().__init__()
        self.dtype, self.fast = dtype, fast
        self.weight = nn.Parameter(torch.randn(64, 128).to(torch.float8_e4m3fn), requires_grad=False)
        self.scale = nn.Parameter(torch.rand(64 if channels else 1, 1) + 0.1, requires_grad=False)
        self.bias = nn.Parameter(torch.randn(64, dtype=dtype), requires_grad=False) if bias else None

    def forward(self, x: torch.Tensor, x_scale: torch.Tensor) -> torch.Tensor:
        """x (tokens, 128), x_scale (tokens, 1) or (1, 1)."""
        scales = x_scale, self.scale.t()
        return torch._scaled_mm(x, self.weight.t(), *scales, self.bias, out_dtype=self.dtype, use_fast_accum=self.fast)


@pytest.mark.parametrize("tokens", [3, 20])
@pytest.mark.parametrize(
    ("dtype", "fast", "channels", "bias", "taken"),
    [
        (torch.bfloat16, True, True, True, True),
        (torch.float16, False, True, False, True),
        (torch.bfloat16, False, False, True, True),
        (torch.float32, False, True, False, False),
    ],
)
def test_torchs_own_product_of_scaled_rows(
    dtype: torch.dtype, fast: bool, channels: bool, bias: bool, taken: bool, tokens: int
) -> None:
    held = weight_spec("float8_e4m3fn", "channel" if channels else "tensor", None)
    quant = ActivationQuant() if channels else ActivationQuant.parse("static")
    linear = linear_spec("linear", ("linear",), (128, 128, 64, 64, (64,), "replicated"), held, quant, False)
    mlp = MLPSpec(
        hidden_size=64, layer_index=0, parallel=WHOLE, intermediate_size=128, local_intermediate_size=128,
        consumers=(linear,), activation="relu",
    )  # fmt: skip
    model = nn.Module()
    model.linear = Scaled(dtype, fast, channels, bias)
    model.forward = model.linear.forward  # type: ignore[method-assign]
    config, ran = FusionConfig.parse(f"+{ROWS}"), []
    made = plan([("", mlp)], Target.named("cpu"), config, Engine(name="transformers", linears={}, linears_apart=True))
    pipeline = Pipeline(made, around=module_index_of(model))

    def lower(graph: Any, *_: Any, **__: Any) -> Any:
        ran.append({node.target._schema.name for node in graph.graph.nodes if hasattr(node.target, "_schema")})
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(model.linear, backend=inductor_with(pipeline, model, lower=lower), dynamic=True)
    x = torch.randn(tokens, 128).to(torch.float8_e4m3fn)
    x_scale = torch.rand(tokens if channels else 1, 1) + 0.1
    with torch.no_grad():
        got, wanted = compiled(x, x_scale), model.linear(x, x_scale)
    torch.testing.assert_close(got, wanted, rtol=1.6e-2, atol=2e-2)
    assert ("layerfuse::scaled_linear" in ran[0], "aten::_scaled_mm" in ran[0]) == (taken, not taken)


@pytest.mark.parametrize(
    ("arch", "fusions", "on"),
    [
        ("sm90", "all", True),
        ("sm90", f"+add_rms_norm_group_quant,+{ROUTED}", True),
        ("sm90", "+add_rms_norm_group_quant", True),
        ("sm90", f"+add_rms_norm_group_quant,-{BLOCKS}", False),
        ("sm90", f"+add_rms_norm_group_quant,-{ROUTED}", False),
        ("sm90", "add_rms_norm_group_quant", False),
        ("sm90", f"{BLOCKS},{ROUTED}", True),
        ("sm90", "none", False),
        ("sm100", "all", False),
    ],
)  # fmt: skip
def test_routed_experts_go_with_linears_in_blocks(arch: str, fusions: str, on: bool) -> None:
    """Where they were timed, for one token or two."""
    found = [*registry.model("deepseek-v3").specs(tp=8, published=True)]
    made = plan(found, Target.named(arch), FusionConfig.parse(fusions), ENGINE)
    mixed = {f"{layer}:experts" for layer, spec in found if isinstance(spec, ResidualSpec) and spec.experts is not None}
    expected = made.expected(ROUTED)
    assert len(mixed) == 58 and {each.site for each in expected} == (mixed if on else set())
    assert {str(each.tokens) for each in expected} == ({"up to 2 tokens"} if on else set())


@pytest.mark.parametrize(("columns", "most"), [(256, 2), (384, 2), (512, 1), (768, 1), (1024, 0), (2048, 0), (None, 2)])
def test_wide_experts_are_the_engines(columns: int | None, most: int) -> None:
    found = [*registry.model("deepseek-v3").specs(tp=8, published=True)]
    wide = [
        (layer, with_experts(spec, intermediate_size=6144, local_intermediate_size=columns)) for layer, spec in found
    ]
    decided = [each for each in plan(wide, SM90, FusionConfig.parse("all"), ENGINE).decisions if each.fusion == ROUTED]
    expected = {str(each.tokens) for each in decided if each.kind == "expected"}
    assert expected == ({f"up to {most} tokens" if most > 1 else "one token"} if most else set())
    assert most or all("more than 768 columns" in each.reason for each in decided)


def with_experts(spec: AnySpec, **changes: Any) -> AnySpec:
    mixed = isinstance(spec, ResidualSpec) and spec.experts is not None
    return attrs.evolve(spec, experts=attrs.evolve(spec.experts, **changes)) if mixed else spec


@pytest.mark.parametrize(
    ("engine", "left"),
    [
        (Engine(name="vllm", linears={}, inside=None), True),
        (Engine(name="vllm", linears={}, inside=None, shared_apart=True), False),
        (Engine(name="vllm", linears={}, inside=None, shared_in_turn=True), False),
        (Engine(name="sglang", linears={}, linears_apart=True), True),
        (Engine(name="transformers", linears={}, linears_apart=True), False),
    ],
    ids=["vLLM", "vLLM, Step-5", "vLLM, one stream", "SGLang", "transformers"],
)
def test_shared_experts_are_the_engines_where_wide_routed_ones_run_beside_them(engine: Engine, left: bool) -> None:
    config = FusionConfig.parse(f"+{BLOCKS}", strict=False)
    config = attrs.evolve(
        config, quant=ActivationQuant.parse("group128,inside" if engine.name == "vllm" else "group128")
    )
    made = plan(registry.model("deepseek-v3").specs(), Target.named("sm90"), config, engine)
    shared = {site.name for site in made.sites if site.role == LINEAR and site.experts is not None}
    found = {
        (each.kind, "hold up the router" in each.reason)
        for each in made.decisions
        if each.site in shared and each.fusion == BLOCKS and each.tokens.first == 1
    }
    assert found == ({("refused", True)} if left else {("expected", False)})


def test_other_experts_are_not_applicable_and_what_an_engine_keeps_is_refused() -> None:
    config = FusionConfig.parse("all")
    plain = [*registry.model("deepseek-v3").specs(tp=8)]
    kinds = {each.kind: each.reason for each in plan(plain, SM90, config, ENGINE).decisions if each.fusion == ROUTED}
    why = "not known: how the routed experts hold their weights; block_scaled_experts reads float8_e4m3fn, one scale per block of 128 x 128"
    assert kinds == {"not_applicable": why}
    found = [*registry.model("deepseek-v3").specs(tp=8, published=True)]
    read = [(layer, with_experts(spec, activation="quantises inside of its kernel")) for layer, spec in found]
    assert len(plan(read, SM90, config, ENGINE).expected(ROUTED)) == 58, "as vLLM's are read"
    for changes, why in (
        ({"weight": weight_spec("float8_e4m3fn", "tensor", None)}, "an expert's weight is float8_e4m3fn, one scale"),
        (
            {"activation": ActivationQuant()},
            "it quantises with one scale per token, which block_scaled_experts does not",
        ),
    ):
        other = plan([(layer, with_experts(spec, **changes)) for layer, spec in found], SM90, config, ENGINE)
        reasons = {(each.kind, each.reason) for each in other.decisions if each.fusion == ROUTED}
        assert {kind for kind, _ in reasons} == {"not_applicable"} and all(why in reason for _, reason in reasons)
    kept = {layer: "its kernel is a stranger's" for layer, spec in found if isinstance(spec, ResidualSpec)}
    made = plan(found, SM90, config, attrs.evolve(ENGINE, linears=kept))
    reasons = {(each.kind, each.reason) for each in made.decisions if each.fusion == ROUTED}
    assert reasons == {("refused", "its kernel is a stranger's")}
