"""By how many ranks a layer was sharded: what it says, what the caller says, and what happens when they differ."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from fake_ranks import cut_plainly
from helpers import fresh_layer
from torch import nn

from layerfuse import registry
from layerfuse.adapters import (
    WHOLE,
    Adapter,
    MLASpec,
    Parallel,
    ParallelConflictError,
    ParallelUnknownError,
    SpecError,
    tensor_parallel,
)
from layerfuse.adapters.vocabulary import SGLANG_MLA, TRANSFORMERS_MLA, VLLM_GPT_OSS

OWN = registry.Registry()
OWN.register_adapter(
    Adapter(
        "mine",
        {
            "mylib:SaysBothCounts": SGLANG_MLA,
            "mylib:SaysTotal": SGLANG_MLA.but(num_local_heads=None),
            "mylib:SaysLocal": SGLANG_MLA.but(num_heads=None, num_local_heads="num_heads"),
            "mylib:SaysSize": SGLANG_MLA.but(num_local_heads=None, tp_size=["shard_tp_size", "attn_tp_size"]),
            "mylib:SaysAll": SGLANG_MLA.but(tp_size="tp_size"),
            "mylib:SaysWeight": TRANSFORMERS_MLA.but(layer_index="layer_id"),
            "mylib:LocalKV": VLLM_GPT_OSS.but(num_kv_heads=None, tp_size="tp_size", layer_index="layer_id"),
        },
    )
)


def layer(name: str, **attributes: Any) -> Any:
    held = {
        "num_heads": 16,
        "hidden_size": 64,
        "layer_id": 1,
        "scaling": 0.1,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "kv_a_layernorm": SimpleNamespace(weight=SimpleNamespace(shape=(512,)), variance_epsilon=1e-6),
        "rotary_emb": None,
        "config": SimpleNamespace(rope_interleave=True, rope_parameters={}, max_position_embeddings=64),
        **attributes,
    }
    return type(name, (SimpleNamespace,), {"__module__": "mylib"})(**held)


def in_group(rank: int) -> Any:
    """A projection of SGLang: its group knows this rank."""
    return SimpleNamespace(tp_group=SimpleNamespace(rank_in_group=rank))


def read(layer: Any, **kwargs: Any) -> MLASpec:
    return OWN.spec_for(layer, **kwargs)


def heads(spec: MLASpec) -> tuple[int, int, int, int | None]:
    return spec.num_heads, spec.num_local_heads, spec.parallel.size, spec.parallel.rank


# ---- what the layer says


def test_both_counts_say_the_size_and_the_rank_stays_unknown() -> None:
    assert heads(read(layer("SaysBothCounts", num_local_heads=2))) == (16, 2, 8, None)
    assert heads(read(layer("SaysBothCounts", num_local_heads=16))) == (16, 16, 1, 0)


def test_a_size_attribute_completes_either_count() -> None:
    assert heads(read(layer("SaysSize", attn_tp_size=4, o_proj=in_group(3)))) == (16, 4, 4, 3)
    # The first name that exists wins: SGLang's delta attention is sharded by the former.
    assert heads(read(layer("SaysSize", shard_tp_size=8, attn_tp_size=4))) == (16, 2, 8, None)


def test_a_local_count_alone_needs_somebody_to_say_the_size() -> None:
    with pytest.raises(ParallelUnknownError) as caught:
        read(layer("SaysLocal"))
    assert str(caught.value) == (
        "mylib:SaysLocal layer 1 does not say by how many tensor-parallel ranks it was sharded; pass "
        "parallel=Parallel(size=..., rank=...) to spec_for, specs_in or fusion.compile, or read it inside `with tensor_parallel(size, rank):`."
    )
    assert heads(read(layer("SaysLocal"), parallel=Parallel(size=8, rank=5))) == (128, 16, 8, 5)


def test_a_size_of_one_is_never_a_guess() -> None:
    with pytest.raises(ParallelUnknownError):
        read(layer("SaysTotal"))
    with pytest.raises(LookupError):  # the same, to guards written by others
        read(layer("SaysTotal"))


def test_every_silence_is_listed() -> None:
    with pytest.raises(ParallelUnknownError) as caught:
        read(layer("SaysSize"))
    assert str(caught.value).splitlines() == [
        "mylib:SaysSize layer 1 does not say by how many tensor-parallel ranks it was sharded. Tried:",
        "  - shard_tp_size: SaysSize has no 'shard_tp_size'",
        "  - attn_tp_size: SaysSize has no 'attn_tp_size'",
        "Pass parallel=Parallel(size=..., rank=...) to spec_for, specs_in or fusion.compile, or read it inside `with tensor_parallel(size, rank):`.",
    ]


def test_counts_without_a_ratio_are_listed_too() -> None:
    with pytest.raises(ParallelUnknownError) as caught:
        read(layer("SaysBothCounts", num_local_heads=3))
    assert caught.value.tried == ("num_heads / num_local_heads: 16 / 3 is no whole number of ranks",)
    with pytest.raises(SpecError, match=r"num_local_heads: expected 8 \(num_heads 16 over 2 ranks\), got 3"):
        read(layer("SaysBothCounts", num_local_heads=3), parallel=Parallel(size=2, rank=0))


@pytest.mark.parametrize("value", [0, -1, None, "8", 8.0, True, [8], {}], ids=repr)
def test_a_size_attribute_that_is_no_size_is_refused_by_its_name(value: Any) -> None:
    with pytest.raises(SpecError) as caught:
        read(layer("SaysAll", num_local_heads=2, tp_size=value))
    assert caught.value.problems == (f"tp_size: expected a tensor-parallel size, got {value!r}",)


def test_a_rank_of_a_larger_group_does_not_tell_which_share_this_is() -> None:
    # The heads are shared by four for a while, out of a group of eight.
    assert heads(read(layer("SaysSize", attn_tp_size=4, o_proj=in_group(4)))) == (16, 4, 4, None)


@pytest.mark.parametrize("rank", [-1, "2", 2.0, True], ids=repr)
def test_a_rank_that_is_none_is_refused(rank: Any) -> None:
    with pytest.raises(SpecError, match="rank: expected 0 to 3, or None if unknown, got "):
        read(layer("SaysSize", attn_tp_size=4, o_proj=in_group(rank)))


def test_one_local_kv_head_may_be_a_share_or_a_replica_and_that_is_said() -> None:
    oai = layer(
        "LocalKV",
        num_attention_heads=64,
        num_local_attention_heads=8,
        num_local_key_value_heads=1,
        head_dim=64,
        attn=SimpleNamespace(head_size_v=64, sliding_window=None),
        sinks=None,
        tp_size=8,
    )
    with pytest.raises(SpecError, match="num_kv_heads: one local head on 8 ranks may be a share or a replica"):
        read(oai)
    oai.num_local_key_value_heads = 4
    assert read(oai).num_kv_heads == 32  # type: ignore[attr-defined]


# ---- what the caller says


def test_what_the_caller_says_fills_silence() -> None:
    assert heads(read(layer("SaysTotal"), parallel=Parallel(size=4, rank=2))) == (16, 4, 4, 2)
    assert heads(read(layer("SaysTotal"), parallel=WHOLE)) == (16, 16, 1, 0)
    # The size is known from the layer; the rank is not, and the caller knows it.
    assert heads(read(layer("SaysBothCounts", num_local_heads=2), parallel=Parallel(size=8, rank=5))) == (16, 2, 8, 5)


def test_contradicting_the_layer_is_an_error_that_names_both() -> None:
    with pytest.raises(ParallelConflictError) as caught:
        read(layer("SaysBothCounts", num_local_heads=2), parallel=Parallel(size=4, rank=0))
    assert str(caught.value) == (
        "mylib:SaysBothCounts layer 1: its tensor-parallel size is contradicted: num_heads / num_local_heads says 8, "
        "the parallel argument says 4. Correct whichever is wrong."
    )
    with pytest.raises(ParallelConflictError) as caught:
        read(layer("SaysSize", attn_tp_size=4, o_proj=in_group(1)), parallel=Parallel(size=4, rank=2))
    assert caught.value.sources == {"the layer": 1, "the parallel argument": 2}


def test_a_layer_that_contradicts_itself_is_an_error_that_names_both() -> None:
    with pytest.raises(ParallelConflictError) as caught:
        read(layer("SaysAll", num_local_heads=2, tp_size=4))
    assert caught.value.sources == {"tp_size": 4, "num_heads / num_local_heads": 8}
    with pytest.raises(ParallelConflictError):
        # A replicated projection says 1 while the heads are shared: reading it there is the mistake to find.
        read(layer("SaysAll", num_local_heads=2, tp_size=1))


def test_the_name_of_the_source_that_spoke_is_given() -> None:
    with pytest.raises(ParallelConflictError) as caught:
        read(layer("SaysSize", attn_tp_size=4), parallel=Parallel(size=2, rank=0))
    assert caught.value.sources == {"attn_tp_size": 4, "the parallel argument": 2}


def test_the_block_fills_silence_and_the_layer_wins_over_it() -> None:
    with tensor_parallel(8, 3) as said:
        assert said == Parallel(size=8, rank=3)
        assert heads(read(layer("SaysTotal"))) == (16, 2, 8, 3)
        assert heads(read(layer("SaysBothCounts", num_local_heads=2))) == (16, 2, 8, 3)  # the rank was unsaid
        assert heads(read(layer("SaysBothCounts", num_local_heads=4))) == (16, 4, 4, None)  # another group's
        assert heads(read(layer("SaysTotal"), parallel=WHOLE)) == (16, 16, 1, 0)  # the argument is nearer
    with pytest.raises(ParallelUnknownError):
        read(layer("SaysTotal"))


def test_blocks_nest_and_end_with_an_exception() -> None:
    def fails_inside() -> None:
        with tensor_parallel(8, 3):
            with tensor_parallel(2):
                assert read(layer("SaysTotal")).parallel == Parallel(size=2, rank=None)
            assert read(layer("SaysTotal")).parallel.size == 8
            raise KeyError

    with pytest.raises(KeyError):
        fails_inside()
    with tensor_parallel(1):
        assert read(layer("SaysTotal")).parallel == WHOLE
    with pytest.raises(ParallelUnknownError):
        read(layer("SaysTotal"))


@pytest.mark.parametrize(("size", "rank"), [(0, None), (-1, 0), (2, 2), (True, None), (2.0, 0)])
def test_a_block_refuses_what_is_no_rank(size: Any, rank: Any) -> None:
    with pytest.raises(SpecError), tensor_parallel(size, rank):
        pass


def test_a_block_is_of_its_own_thread() -> None:
    seen: list[Any] = []

    def other() -> None:
        try:
            seen.append(read(layer("SaysTotal")))
        except ParallelUnknownError as error:
            seen.append(type(error))

    with tensor_parallel(8):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert seen == [ParallelUnknownError]


# ---- what the weight says


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_a_plain_local_shard_says_the_size_and_no_rank(size: int) -> None:
    layer = fresh_layer("deepseek-v3")
    assert registry.spec_for(layer).parallel == WHOLE
    cut_plainly(layer.kv_b_proj, size, 0)
    spec = registry.spec_for(layer)
    assert (spec.num_heads, spec.num_local_heads, spec.parallel) == (128, 128 // size, Parallel(size=size, rank=None))
    assert registry.spec_for(layer, parallel=Parallel(size=size, rank=1)).parallel.rank == 1
    with pytest.raises(ParallelConflictError, match="the weight of kv_b_proj says"):
        registry.spec_for(layer, parallel=WHOLE)


def test_a_weight_that_is_no_even_shard_is_unknown_with_what_was_tried() -> None:
    layer = fresh_layer("deepseek-v3")
    # Packed four-bit weights: two numbers to a byte, so that half the rows are missing on each side.
    layer.kv_b_proj.weight = nn.Parameter(layer.kv_b_proj.weight.new_empty(8388608, 1), requires_grad=False)
    layer.o_proj = nn.Identity()
    with pytest.raises(ParallelUnknownError) as caught:
        registry.spec_for(layer)
    assert caught.value.tried == (
        "the weight of kv_b_proj: a weight of shape (8388608, 1) is no even shard of (32768, 512)",
        "the weight of o_proj: Identity has no 'weight'",
    )
    assert registry.spec_for(layer, parallel=Parallel(size=2, rank=0)).num_local_heads == 64


@pytest.mark.parametrize(
    ("projection", "tried"),
    [
        (None, "the weight of kv_b_proj: NoneType has no 'weight'"),
        (nn.Identity(), "the weight of kv_b_proj: Identity has no 'weight'"),
        (nn.LayerNorm(4, device="meta"), "the weight of kv_b_proj: LayerNorm has no 'out_features'"),
    ],
    ids=["None", "Identity", "LayerNorm"],
)
def test_a_projection_that_is_no_linear_module_is_said(projection: Any, tried: str) -> None:
    layer = fresh_layer("deepseek-v3")
    layer.kv_b_proj, layer.o_proj = projection, nn.Identity()
    with pytest.raises(ParallelUnknownError) as caught:
        registry.spec_for(layer)
    assert caught.value.tried == (tried, "the weight of o_proj: Identity has no 'weight'")
