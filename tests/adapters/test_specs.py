"""Specs: what they refuse, what they derive, and how they behave as values."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from specs_at_hand import EVERY, OUTER, delta_net, gated_norm, gqa, mla, parallels, residual, whole

from layerfuse.adapters.errors import SpecError
from layerfuse.adapters.specs import LARGEST, WHOLE, NormSpec, Parallel, RopeSpec, kind_of

COUNTS = [
    (make, attribute.name)
    for make in EVERY.values()
    for attribute in attrs.fields(type(make()))
    if kind_of(attribute) in ("count", "optional_count", "width_or_zero", "index", "optional_index", "window")
]


def problems_of(make: Any, **changes: Any) -> tuple[str, ...]:
    with pytest.raises(SpecError) as caught:
        make(**changes)
    return caught.value.problems


# ---- single fields


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (True, "expected a whole number, got True (bool)"),
        (64.0, "expected a whole number, got 64.0 (float)"),
        ("64", "expected a whole number, got '64' (str)"),
        (10**18, f"expected at most {LARGEST}, got 1000000000000000000"),
        (10**5000, f"expected at most {LARGEST}, got int, too long or too broken to print"),
        (-(10**5000), "got int, too long or too broken to print"),
        (-1, "got -1"),
    ],
    ids=["bool", "float", "str", "10^18", "10^5000", "-10^5000", "negative"],
)
def test_every_count_refuses_what_is_no_count_by_its_own_name(value: Any, problem: str) -> None:
    said = {(make, name): problems_of(make, **{name: value}) for make, name in COUNTS}
    refused = {
        (make, name) for (make, name), (text, *more) in said.items() if text.startswith(f"{name}: ") and not more
    }
    assert {each: said[each] for each in COUNTS if each not in refused or problem not in said[each][0]} == {}


def test_zero_is_refused_wherever_it_is_no_answer() -> None:
    for make, name in COUNTS:
        if name == "layer_index":
            assert make(layer_index=0).layer_index == 0
        elif name == "qk_rope_head_dim":
            assert make(qk_rope_head_dim=0).latent_width == make().kv_lora_rank
        else:
            assert problems_of(make, **{name: 0}) == (f"{name}: expected at least 1, got 0",), make


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), 0.0, -1e-6, 0, True, "1e-6", None, pytest.param(10**5000, id="10^5000")]
)
def test_an_epsilon_is_a_positive_finite_number(value: Any) -> None:
    (problem,) = problems_of(lambda **kw: NormSpec(width=8, **kw), epsilon=value)
    assert problem.startswith("epsilon: expected")


def test_whole_numbers_are_taken_for_floats_where_a_float_is_meant() -> None:
    assert type(NormSpec(width=8, epsilon=1).epsilon) is float
    assert NormSpec(width=8, epsilon=1) == NormSpec(width=8, epsilon=1.0)


@pytest.mark.parametrize("value", [1, 0, None, "true"])
def test_a_flag_is_true_or_false_and_nothing_like_it(value: Any) -> None:
    assert problems_of(gqa, has_sinks=value) == (f"has_sinks: expected true or false, got {value!r}",)


@pytest.mark.parametrize("value", ["swish", "gelu", None, ["silu"], 1])
def test_the_activation_of_a_gate_is_one_of_two(value: Any) -> None:
    assert problems_of(gated_norm, activation=value) == (f"activation: expected one of silu, sigmoid, got {value!r}",)


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        mla(num_heads=0, kv_lora_rank=True, v_head_dim="128", softmax_scale=-1.0)
    assert str(caught.value).splitlines() == [
        "MLASpec:",
        "  - num_heads: expected at least 1, got 0",
        "  - kv_lora_rank: expected a whole number, got True (bool)",
        "  - v_head_dim: expected a whole number, got '128' (str)",
        "  - softmax_scale: expected more than 0, got -1.0",
    ]


def test_all_contradictions_are_reported_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        mla(
            num_heads=10,
            num_local_heads=5,
            parallel=Parallel(size=4, rank=0),
            qk_rope_head_dim=63,
            q_norm=NormSpec(width=1535, epsilon=1e-6),
            kv_norm=NormSpec(width=576, epsilon=1e-6),
        )
    assert str(caught.value).splitlines() == [
        "MLASpec:",
        "  - num_heads: 10 heads cannot be shared equally by 4 ranks",
        "  - qk_rope_head_dim: rotary embedding turns pairs, so it must be even, got 63",
        "  - q_norm: width 1535 is not the q_lora_rank 1536",
        "  - kv_norm: width 576 is not the kv_lora_rank 512",
    ]


# ---- pairs, norms, splits


def test_local_heads_must_be_the_share_of_the_total() -> None:
    assert problems_of(mla, num_local_heads=16) == (
        "num_local_heads: expected 128 (num_heads 128 over 1 ranks), got 16",
    )
    assert problems_of(mla, parallel=Parallel(size=8, rank=2)) == (
        "num_local_heads: expected 16 (num_heads 128 over 8 ranks), got 128",
    )


@pytest.mark.parametrize(("size", "local", "replicas"), [(1, 8, 1), (2, 4, 1), (8, 1, 1), (16, 1, 2), (64, 1, 8)])
def test_kv_heads_are_replicated_once_ranks_outnumber_them(size: int, local: int, replicas: int) -> None:
    spec = gqa().shard(size)
    assert (spec.num_local_kv_heads, spec.num_kv_head_replicas) == (local, replicas)


def test_kv_heads_that_neither_divide_nor_are_divided_are_refused() -> None:
    with pytest.raises(SpecError, match="8 KV heads cannot be shared equally by 3 ranks"):
        gqa(num_heads=24, num_local_heads=24).shard(3)
    with pytest.raises(SpecError, match="6 KV heads cannot be replicated evenly over 8 ranks"):
        gqa(num_heads=24, num_local_heads=24, num_kv_heads=6, num_local_kv_heads=6).shard(8)


def test_zero_local_kv_heads_are_refused_by_name() -> None:
    # What vLLM's and ATOM's GPT-OSS attention holds at 16 ranks: 8 // 16.
    problems = problems_of(gqa, parallel=Parallel(size=16, rank=0), num_local_heads=4, num_local_kv_heads=0)
    assert problems == ("num_local_kv_heads: expected at least 1, got 0",)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"q_lora_rank": None}, "q_norm: a query latent and its norm come together, got q_lora_rank None"),
        ({"q_norm": None}, "q_norm: a query latent and its norm come together, got q_lora_rank 1536 and None"),
    ],
)
def test_a_query_latent_and_its_norm_come_together(changes: dict[str, Any], problem: str) -> None:
    (found,) = problems_of(mla, **changes)
    assert found.startswith(problem)
    assert mla(q_lora_rank=None, q_norm=None).split_sizes == (512, 64)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"rope": RopeSpec(width=7, interleaved=False, attention_scaling=1.0)}, "rope: width 7 is odd"),
        ({"values_are_keys": True, "v_head_dim": 32}, "v_head_dim: 32 is not the head_dim 64"),
    ],
)
def test_heads_of_grouped_queries_are_turned_in_pairs_and_keys_are_as_wide_as_values_that_are_keys(
    changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(SpecError, match=problem):
        gqa(**changes)


def test_a_delta_net_ties_its_norm_and_its_heads() -> None:
    assert problems_of(delta_net, num_v_heads=24, num_local_v_heads=24) == (
        "num_v_heads: 24 is no multiple of num_k_heads 16",
    )
    assert problems_of(delta_net, head_v_dim=256) == ("output_norm: width 128 is not the head_v_dim 256",)
    assert problems_of(gated_norm, group_size=48) == ("group_size 48 does not divide the width 128",)


def test_a_residual_stream_has_one_norm_after_each_norm_before() -> None:
    norm, narrow = NormSpec(width=7168, epsilon=1e-6), NormSpec(width=64, epsilon=1e-6)
    assert problems_of(residual, input_norms=(norm, norm)) == (
        "post_attention_norms: expected one per input norm, got 1 for 2",
    )
    assert problems_of(residual, input_norms=(narrow,)) == ("a norm's width 64 is not the hidden_size 7168",)
    assert problems_of(residual, input_norms=(), post_attention_norms=()) == (
        "added_as_given: expected false where no norm reads the stream, as the layer's norms stand before its adds",
    )
    assert problems_of(residual, input_norms=())[0] == "post_attention_norms: expected one per input norm, got 1 for 0"
    assert problems_of(residual, input_norms=[norm])[0].startswith("input_norms: expected a tuple of NormSpec")


@pytest.mark.parametrize(
    ("size", "rank", "problem"),
    [
        (0, 0, "size: expected at least 1, got 0"),
        (True, 0, "size: expected a whole number, got True (bool)"),
        (2, 2, "rank: expected 0 to 1, or None if unknown, got 2"),
        (2, -1, "rank: expected 0 to 1, or None if unknown, got -1"),
        (2, True, "rank: expected 0 to 1, or None if unknown, got True"),
        (1, None, "rank: the only rank of a size of 1 is 0, got None"),
        pytest.param(
            2,
            10**5000,
            "rank: expected 0 to 1, or None if unknown, got int, too long or too broken to print",
            id="huge",
        ),
    ],
)
def test_a_rank_lies_within_its_size(size: Any, rank: Any, problem: str) -> None:
    assert problems_of(Parallel, size=size, rank=rank) == (problem,)


def test_the_derived_widths_mean_one_thing_each() -> None:
    spec = mla().shard(8)
    assert (spec.qk_head_dim, spec.latent_width, spec.split_sizes) == (192, 576, (1536, 512, 64))
    delta = delta_net().shard(4)
    assert (delta.gated_norm_shape, delta.conv_dim) == ((8, 128), 2 * 4 * 128 + 8 * 128)


# ---- sharding


@given(whole, st.integers(1, 16), st.data())
def test_the_locals_of_all_ranks_add_up_to_the_total(spec: Any, size: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, size - 1))
    try:
        local = spec.shard(size, rank)
    except SpecError as refused:
        assert any(
            getattr(spec, pair.total) % size and (not pair.replicates or size % getattr(spec, pair.total))
            for pair in spec.pairs
        )
        assert all(str(size) in problem for problem in refused.problems)
        return
    assert local.parallel == Parallel(size=size, rank=rank)
    for pair in spec.pairs:
        total, share = getattr(spec, pair.total), getattr(local, pair.local)
        if pair.replicates and size > total:
            assert (share, size % total) == (1, 0)
        else:
            assert share * size == total
    unsharded = {pair.local for pair in spec.pairs} | {"parallel"}
    for attribute in attrs.fields(type(spec)):
        if attribute.name not in unsharded:
            assert getattr(local, attribute.name) == getattr(spec, attribute.name)


@given(whole, st.integers(1, 16))
def test_sharding_starts_from_the_total_whatever_the_shard(spec: Any, size: int) -> None:
    try:
        local = spec.shard(size)
    except SpecError:
        return
    assert local.shard(size) == local
    assert local.shard(1) == spec


def test_a_refused_sharding_names_every_count_and_the_size() -> None:
    with pytest.raises(SpecError) as caught:
        delta_net().shard(5)
    assert str(caught.value).splitlines() == [
        "GatedDeltaNetSpec at tensor-parallel size 5:",
        "  - 16 heads cannot be shared equally by 5 ranks",
        "  - 32 heads cannot be shared equally by 5 ranks",
    ]


@pytest.mark.parametrize("size", [0, -1, True, 2.0, None, 10**400])
def test_sharding_by_a_size_that_is_none_is_a_spec_error(size: Any) -> None:
    for make in OUTER.values():
        with pytest.raises(SpecError):
            make().shard(size)


# ---- as values


@pytest.mark.parametrize("make", EVERY.values(), ids=EVERY)
def test_specs_are_values(make: Any) -> None:
    spec = make()
    assert spec == make() and hash(spec) == hash(make())
    assert spec != make(layer_index=4)
    assert copy.copy(spec) == spec and copy.deepcopy(spec) == spec
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        back = pickle.loads(pickle.dumps(spec, protocol))
        assert back == spec and type(back) is type(spec) and hash(back) == hash(spec)
    assert len({spec, make(), make(layer_index=4)}) == 2


@pytest.mark.parametrize("make", EVERY.values(), ids=EVERY)
def test_specs_are_frozen_and_slotted(make: Any) -> None:
    spec = make()
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        spec.layer_index = 5
    with pytest.raises((AttributeError, TypeError)):
        spec.number_of_heads = 5
    with pytest.raises(TypeError, match="positional"):
        type(spec)(1)


@pytest.mark.parametrize("make", EVERY.values(), ids=EVERY)
def test_the_repr_rebuilds_the_spec(make: Any) -> None:
    import layerfuse.adapters.specs as names

    spec = make()
    assert eval(repr(spec), vars(names)) == spec


def test_evolve_validates_what_it_makes() -> None:
    assert attrs.evolve(mla(), layer_index=7).layer_index == 7
    with pytest.raises(SpecError, match="num_local_heads: expected 64"):
        attrs.evolve(mla(), num_heads=64)


@given(whole, parallels())
def test_a_spec_error_survives_pickling(spec: Any, parallel: Parallel) -> None:
    try:
        attrs.evolve(spec, parallel=parallel)
    except SpecError as error:
        back = pickle.loads(pickle.dumps(error))
        assert (str(back), back.problems) == (str(error), error.problems)


def test_equal_specs_of_different_types_are_different() -> None:
    plain = NormSpec(width=128, epsilon=1e-5)
    assert plain != gated_norm()
    assert Parallel(size=1, rank=0) == WHOLE


# ---- where a norm was read


def test_the_module_of_a_norm_is_no_part_of_what_it_is() -> None:
    declared = NormSpec(width=512, epsilon=1e-6)
    read = attrs.evolve(declared, module="q_a_layernorm")
    assert (declared.module, read.module) == (None, "q_a_layernorm")
    assert read == declared and hash(read) == hash(declared) and repr(read) == repr(declared)
    assert pickle.loads(pickle.dumps(read)).module == "q_a_layernorm"
    assert attrs.evolve(gated_norm(), module="o_norm") == gated_norm()


def test_the_module_of_a_norm_is_a_path() -> None:
    with pytest.raises(SpecError, match="module: expected str, got 3"):
        NormSpec(width=512, epsilon=1e-6, module=3)  # type: ignore[arg-type]
