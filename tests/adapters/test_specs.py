"""Specs: what they refuse, what they derive, and how they behave as values."""

from __future__ import annotations

import copy
import json
import pickle
import re
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from specs_at_hand import EVERY, OUTER, delta_net, gated_norm, gqa, linear, mla, parallels, whole

from layerfuse.adapters.errors import SpecError
from layerfuse.adapters.specs import LARGEST, WHOLE, NormSpec, Parallel, RopeSpec, WeightSpec, kind_of

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


# ---- pairs, norms, splits

REFUSED = re.split(r"\n(?!!)", (Path(__file__).parent / "refused_specs.txt").read_text(encoding="utf-8").strip())
"""A kind of spec and what it has otherwise than the one at hand, and every problem of it."""
MAKERS = {
    **{make.__name__: make for make in (*EVERY.values(), gated_norm, linear)},
    "parallel": Parallel,
    "weight": partial(WeightSpec, dtype="float8_e4m3fn"),
}


def held(name: str, value: Any) -> Any:
    """What stands for a field in the text: parts of a spec are lists there."""
    if name.endswith("norms") and isinstance(value, list):
        return tuple(held("norm", each) for each in value)
    if not isinstance(value, list) or name == "activation":
        return value
    parts: dict[str, Any] = {
        "norm": lambda: NormSpec(width=value[0], epsilon=value[1]),
        "parallel": lambda: Parallel(size=value[0], rank=value[1]),
        "rope": lambda: RopeSpec(width=value[0], interleaved=value[1], attention_scaling=value[2]),
    }
    return parts.get(name.rpartition("_")[2], lambda: tuple(value))()


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_with_every_problem(case: str) -> None:
    said, *problems = case.split("\n")
    kind, _, changes = said.partition(" ")
    given = {name: held(name, value) for name, value in json.loads(changes).items()}
    assert problems_of(MAKERS[kind], **given) == tuple(problem[2:] for problem in problems)


def test_a_huge_rank_is_not_printed() -> None:
    (problem,) = problems_of(Parallel, size=2, rank=10**5000)
    assert problem == "rank: expected 0 to 1, or None if unknown, got int, too long or too broken to print"


def test_queries_without_a_latent_are_no_part_of_the_split() -> None:
    assert mla(q_lora_rank=None, q_norm=None).split_sizes == (512, 64)


@pytest.mark.parametrize(("size", "local", "replicas"), [(1, 8, 1), (2, 4, 1), (8, 1, 1), (16, 1, 2), (64, 1, 8)])
def test_kv_heads_are_replicated_once_ranks_outnumber_them(size: int, local: int, replicas: int) -> None:
    spec = gqa().shard(size)
    assert (spec.num_local_kv_heads, spec.num_kv_head_replicas) == (local, replicas)


def test_kv_heads_that_neither_divide_nor_are_divided_are_refused() -> None:
    with pytest.raises(SpecError, match="8 KV heads cannot be shared equally by 3 ranks"):
        gqa(num_heads=24, num_local_heads=24).shard(3)
    with pytest.raises(SpecError, match="6 KV heads cannot be replicated evenly over 8 ranks"):
        gqa(num_heads=24, num_local_heads=24, num_kv_heads=6, num_local_kv_heads=6).shard(8)


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
