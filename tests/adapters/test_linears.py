"""Linears around norms and products: their sizes in the model and on a rank, their weights, what they do to what they read."""

from __future__ import annotations

import pickle
from typing import Any

import attrs
import pytest
import standins_atom
from fake_ranks import cut, cut_plainly, ranks
from helpers import fp8_model, fresh_layer, real_model
from specs_at_hand import PLAIN, linear
from standins import Rank
from torch import nn

from layerfuse import registry
from layerfuse.adapters import ActivationQuant, LinearSpec, WeightSpec
from layerfuse.adapters.linears import linear_of
from layerfuse.fusion import FusionConfig, Target, plan, sites_of
from layerfuse.testing.compare import linears_of, misfit, norms_in

GROUP = ActivationQuant(group_size=128)
BLOCK = WeightSpec(dtype="float8_e4m3fn", scheme="block", block=(128, 128))


def around(spec: Any) -> dict[str, LinearSpec]:
    return {found.path: found for found, *_ in linears_of(spec)}


# ---- the spec


def test_totals_and_locals_go_with_the_ranks() -> None:
    assert linear().problem_over(8) is None
    assert linear().problem_over(4) == "o_proj: local_in_features 2048 on each of 4 ranks are not in_features 16384"
    copied = {"style": "column", "local_in_features": 16384, "local_out_features": 1024, "local_outputs": (1024,)}
    assert linear(**copied).problem_over(8) is None  # 8 times 1024 are more than 7168: heads that ranks have copies of
    assert (
        linear(**copied).problem_over(4)
        == "o_proj: local_out_features 1024 on each of 4 ranks are not out_features 7168"
    )
    whole = linear(style="replicated", local_in_features=16384)
    assert whole.problem_over(8) is None
    assert linear(local_in_features=None).problem_over(3) is None


def test_it_is_compared_and_sent_like_other_specs() -> None:
    one = linear(activation=GROUP, weight=BLOCK)
    assert pickle.loads(pickle.dumps(one)) == one == attrs.evolve(one)
    assert one != linear(weight=BLOCK) and hash(one) != hash(linear(weight=BLOCK))


# ---- transformers


def test_the_linears_of_a_layer_with_their_sizes() -> None:
    model = real_model("deepseek-v3")
    decoder = model.model.layers[3]
    found = around(registry.spec_for(decoder)) | around(registry.spec_for(decoder.self_attn))
    assert {path: (read.in_features, read.out_features) for path, read in found.items()} == {
        "self_attn.q_a_proj": (7168, 1536),
        "self_attn.kv_a_proj_with_mqa": (7168, 576),
        "mlp.shared_experts.gate_proj": (7168, 2048),
        "mlp.shared_experts.up_proj": (7168, 2048),
        "self_attn.o_proj": (16384, 7168),
        "q_b_proj": (1536, 24576),
        "kv_b_proj": (512, 32768),
    }
    assert found["self_attn.q_a_proj"].shares_input == ("self_attn.kv_a_proj_with_mqa",)
    assert found["q_b_proj"].shares_input == ()
    dtype = str(decoder.self_attn.q_a_proj.weight.dtype).removeprefix("torch.")
    assert {read.weight for read in found.values()} == {attrs.evolve(PLAIN, dtype=dtype)}
    assert {(read.activation, read.takes_quantised) for read in found.values()} == {(None, False)}
    norm = registry.spec_for(decoder).input_norm
    assert (norm.quant, norm.unquantised) == (None, None)


@pytest.mark.parametrize(
    "name", ["deepseek-v3", "deepseek-v2-lite", "kimi-linear-48b-a3b", "qwen3.5-27b", "longcat-flash", "gpt-oss-20b"]
)
def test_every_linear_of_every_real_layer_reads_the_norms_width(name: str) -> None:
    model, count = real_model(name), 0
    for path, spec in registry.specs_in(model):
        for found, *widths in linears_of(spec):
            assert misfit(found, *widths, 1) is None, (path, found)
            held = model.get_submodule(f"{path}.{found.path}")
            assert (found.in_features, found.out_features) == (held.in_features, held.out_features)
            assert found.weight is not None and found.style == "replicated"
            count += 1
    assert count > 2 * model.config.get_text_config().num_hidden_layers


def test_each_attention_of_longcat_gives_to_the_norm_behind_it() -> None:
    spec = registry.spec_for(real_model("longcat-flash").model.layers[2])
    given = [[found.path for found in norm.producers] for norm in norms_in(spec)]
    assert given == [[], ["mlps.0.down_proj"], ["self_attn.0.o_proj"], ["self_attn.1.o_proj"]]


def test_fp8_linears_say_their_blocks_and_what_they_quantise() -> None:
    layer = fp8_model("deepseek-v3").model.layers[3].self_attn
    (found,) = registry.spec_for(layer).q_norm.consumers
    assert (found.weight, found.activation, found.local_outputs) == (BLOCK, GROUP, (24576,))
    (whole,) = registry.spec_for(
        fp8_model("deepseek-v3", weight_block_size=None).model.layers[3].self_attn
    ).q_norm.consumers
    assert whole.weight == WeightSpec(dtype="float8_e4m3fn", scheme="tensor", block=None)
    assert whole.activation == ActivationQuant()


@pytest.mark.parametrize(("dim", "style", "local"), [(0, "column", (7168, 192)), (1, "row", (896, 1536))])
@pytest.mark.parametrize("how", ["a mesh", "a plain shard"])
def test_a_shard_of_the_weight_tells_this_ranks_sizes(dim: int, style: str, local: tuple[int, int], how: str) -> None:
    layer = fresh_layer("deepseek-v3", "model.layers.3")
    projection = layer.self_attn.q_a_proj
    with ranks((8,), ("tp",), 5) as mesh:
        if how == "a mesh":
            cut(projection, mesh, dim)
        else:
            cut_plainly(projection, 8, dim)
        found = around(registry.spec_for(layer))["self_attn.q_a_proj"]
    assert (found.in_features, found.out_features) == (7168, 1536)
    assert (found.local_in_features, found.local_out_features, found.style) == (*local, style)
    assert found.problem_over(8) is None


def test_what_fsdp_cuts_every_rank_has() -> None:
    layer = fresh_layer("deepseek-v3", "model.layers.3")
    with ranks((8,), ("fsdp",), 5) as mesh:
        cut(layer.self_attn.q_a_proj, mesh, 0)
        found = around(registry.spec_for(layer))["self_attn.q_a_proj"]
    assert (found.local_out_features, found.style) == (1536, "replicated")


def test_a_packed_weight_tells_no_shard() -> None:
    import torch

    layer = fresh_layer("deepseek-v3")
    packed = torch.empty(24576 * 1536 // 2, 1, dtype=torch.uint8, device="meta")
    layer.q_b_proj.weight = nn.Parameter(packed, requires_grad=False)
    (found,) = registry.spec_for(layer).q_norm.consumers
    assert (found.in_features, found.out_features) == (1536, 24576)
    assert (found.local_in_features, found.local_out_features, found.local_outputs) == (None, None, ())
    assert (found.style, found.weight) == (None, None)


def test_reading_is_live_and_equal_linears_are_one() -> None:
    layer = fresh_layer("deepseek-v3")
    before = registry.spec_for(layer).q_norm.consumers[0]
    assert registry.spec_for(layer).q_norm.consumers[0] is before
    layer.q_b_proj = nn.Linear(1536, 99, bias=False, device="meta")
    assert registry.spec_for(layer).q_norm.consumers[0].out_features == 99


@pytest.mark.parametrize("odd", [1536.0, "1536", None, True])
def test_sizes_that_are_no_whole_numbers_are_not_said(odd: Any) -> None:
    """And never taken for equal ones that were read before."""
    layer = fresh_layer("deepseek-v3")
    assert registry.spec_for(layer).q_norm.consumers[0].in_features == 1536
    layer.q_b_proj.in_features = odd
    found = registry.spec_for(layer).q_norm.consumers[0]
    assert (found.in_features, found.local_in_features, found.style) == (None, None, None)


def test_what_is_no_linear_says_nothing_of_itself() -> None:
    found = linear_of("o_proj", ("o_proj",), nn.Identity())
    assert (found.in_features, found.local_outputs, found.style, found.weight) == (None, (), None, None)
    assert isinstance(found.activation, str)


@pytest.mark.parametrize("path", ["model.layers.0", "model.layers.3.self_attn", "model.layers.0.mlp"])
def test_a_spec_that_is_shared_anew_has_no_linears_of_other_sizes(path: str) -> None:
    spec = registry.spec_for(real_model("deepseek-v3").get_submodule(path))
    assert list(linears_of(spec)) and list(linears_of(spec.shard(8))) == []
    assert list(linears_of(spec.shard(1))) == list(linears_of(spec))


# ---- the engine that cannot be built


def test_in_atom_the_total_is_the_share_of_all_ranks() -> None:
    entry = registry.model("deepseek-v3")
    layer = standins_atom.mlp(entry, entry.mlps["dense"], Rank(8, 5), "deepseek_v2:DeepseekV2MLP")
    (down,) = registry.spec_for(layer).consumers
    assert (down.in_features, down.local_in_features, down.out_features, down.style) == (18432, 2304, 7168, "row")
    merged = linear_of("gate_up_proj", ("gate_up_proj",), layer.gate_up_proj)
    assert (merged.out_features, merged.local_out_features, merged.style) == (36864, 4608, "column")


def test_over_all_ranks_they_are_the_models() -> None:
    read: dict[int, dict[str, LinearSpec]] = {}
    for size in (1, 8):
        model = standins_atom.MODELS["deepseek-v3"](registry.model("deepseek-v3"), Rank(size, size - 1))
        read[size] = {}
        for path, spec in registry.specs_in(model):
            for found, *widths in linears_of(spec):
                assert misfit(found, *widths, size) is None, (path, found)
                read[size][f"{path}.{found.path}"] = found
    for path, found in read[8].items():
        alone = read[1][path]
        assert (found.in_features, found.out_features, found.style) == (
            alone.in_features,
            alone.out_features,
            alone.style,
        )
    assert any(found.style == "row" for found in read[8].values())


# ---- sites


def test_a_site_knows_who_reads_it_and_what_is_added_in_front_of_it() -> None:
    decoder = real_model("deepseek-v3").model.layers[3]
    entry, behind = sites_of("model.layers.3", registry.spec_for(decoder))
    assert [found.path for found in entry.consumers] == ["self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"]
    assert [found.path for found in behind.producers] == ["self_attn.o_proj"] and entry.producers == ()
    (latents,) = sites_of("model.layers.3.self_attn", registry.spec_for(decoder.self_attn))
    assert [found.path for found in latents.consumers] == ["q_b_proj", "kv_b_proj"]
    (product,) = sites_of("mlp", registry.spec_for(decoder.mlp.shared_experts))
    assert [(found.path, found.in_features) for found in product.consumers] == [("down_proj", 2048)]


def test_what_passes_a_norm_before_the_add_is_no_producer() -> None:
    decoder = fresh_layer("deepseek-v3", "model.layers.3")
    spec = registry.spec_for(decoder)
    assert sites_of("", spec)[1].producers
    assert sites_of("", attrs.evolve(spec, added_as_given=False))[1].producers == ()


def test_how_many_quantise_is_said_where_not_all_do() -> None:
    decoder = fp8_model("qwen3-4b", "k_proj", "v_proj").model.layers[3]
    spec = registry.spec_for(decoder)
    entry, behind = sites_of("model.layers.3", spec)
    assert (entry.quantising, behind.quantising, behind.quant) == ("1 of 3 quantise it", None, GROUP)
    made = plan([("model.layers.3", spec)], Target.named("gfx950"), FusionConfig())
    (decision,) = [d for d in made.at(entry.name) if d.fusion == "add_rms_norm_group_quant"]
    assert decision.reason == (
        "the linears that read the input site agree on no quantisation that a fusion knows (1 of 3 quantise it): "
        "self_attn.q_proj: quantises them with one scale per 128 columns; "
        "self_attn.k_proj and self_attn.v_proj: takes its activations as they are"
    )


def test_what_a_dense_layer_adds_last_stands_in_front_of_the_next_norm() -> None:
    """And what experts add is no one linear's, nor what is normed before it is added."""
    specs = registry.specs_in(real_model("deepseek-v3"))
    made = plan(specs, Target.named("gfx950"))
    given = {site.name: [found.path for found in site.producers] for site in made.sites if site.role == "input"}
    assert [given[f"model.layers.{index}:input"] for index in range(5)] == [[], *[["mlp.down_proj"]] * 3, []]
    dense = registry.specs_in(real_model("qwen3-4b"))
    assert plan(dense, Target.named("gfx950")).site["model:final"].producers[0].path == "mlp.down_proj"
    gemma = plan(registry.specs_in(real_model("gemma-3-1b")), Target.named("gfx950"))
    assert {site.producers for site in gemma.sites} == {()}


def test_what_reads_a_norm_is_in_the_key_of_a_compiled_graph() -> None:
    """And the rank is not, nor who asked."""
    from layerfuse.fusion.rewrite.identity import plan_hash

    decoder, target = fresh_layer("qwen3-4b", "model.layers.3"), Target.named("gfx950")

    def key() -> str:
        return plan_hash(plan([("layer", registry.spec_for(decoder))], target))

    before = key()
    assert key() == before
    decoder.self_attn.q_proj.out_features *= 2
    decoder.self_attn.q_proj.weight = nn.Parameter(decoder.self_attn.q_proj.weight.repeat(2, 1), requires_grad=False)
    assert key() != before
