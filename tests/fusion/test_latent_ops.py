"""The ops of an MLA decode layer, against float64, by the reference and by the kernels: results, rules, and every byte of the cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import in_turn
from latent_support import (
    DEEPSEEK,
    SMALL,
    Guarded,
    Widths,
    assert_fp8,
    entry_values,
    latents,
    normed,
    rotated,
    tables,
)

from layerfuse.fusion import ops
from layerfuse.fusion.backends.triton import tuning
from layerfuse.fusion.declare import PAIRS

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
EPS = {torch.float32: 2**-23, torch.float16: 2**-10, torch.bfloat16: 2**-7}
"""Triton's interpreter cuts float32 down to bfloat16 where the hardware rounds to nearest: a whole unit."""
SCALE = 0.0625
LAYOUTS = {
    "slots": {"pages": 24, "page_size": None},
    "pages of 1": {"pages": 24, "page_size": 1},
    "pages of 8": {"pages": 3, "page_size": 8},
}
FORMS = ("plain", "fp8", "fp8_ds_mla")


def cache_for(form: str, widths: Widths, dtype: torch.dtype, layout: str = "pages of 8", **changes: Any) -> Guarded:
    return Guarded.of(form, widths, dtype=dtype, device=DEVICE, **{**LAYOUTS[layout], **changes})


def scale_of(value: float = SCALE) -> torch.Tensor:
    return torch.tensor([value], device=DEVICE)


def write(
    given: dict[str, Any], guarded: Guarded, slots: Any, pairs: str = "interleaved", name: str = "", **more: Any
) -> Any:
    slots = torch.as_tensor(slots, device=DEVICE)
    function = getattr(ops, f"mla_norm_rope_cache{name}")
    return function(**given, slots=slots, cache=guarded.cache, cache_scale=scale_of(), pairs=pairs, **more)


def assert_entry(
    guarded: Guarded,
    slot: int,
    given: dict[str, Any],
    token: int,
    form: str,
    widths: Widths,
    pairs: str = "interleaved",
) -> None:
    dtype = given["kv"].dtype
    latent = normed(given["kv"][token], given["kv_weight"], given["kv_epsilon"], given.get("kv_weight_offset", 0.0))
    one = slice(token, token + 1)
    rope = rotated(given["k_rope"][one], given["cos"], given["sin"], given["positions"][one], pairs)[0]
    got = entry_values(guarded.entry(slot), form, widths, dtype, SCALE)
    # Half of the smallest step of e4m3, 2^-9, is lost below it; the scale of a group of this cache is at most 4 / 448.
    small = {"plain": 1e-6, "fp8": SCALE * 2**-9, "fp8_ds_mla": 4 / 448 * 2**-9}[form]
    if form == "plain":
        torch.testing.assert_close(got[: widths.kv], latent, rtol=EPS[dtype], atol=small)
    else:
        assert_fp8(got[: widths.kv], latent, small)
    if form == "fp8":
        assert_fp8(got[widths.kv :], rope, small)
    else:  # turned columns are differences of products: float32's error is one of those
        step = EPS[torch.bfloat16 if form == "fp8_ds_mla" else dtype]
        torch.testing.assert_close(got[widths.kv :], rope, rtol=step, atol=1e-6)


def assert_query(got: torch.Tensor, given: dict[str, Any]) -> None:
    q = given["q"]
    wanted = normed(q, given["q_weight"], given["q_epsilon"], given.get("q_weight_offset", 0.0))
    assert (got.dtype, got.shape, got.is_contiguous()) == (q.dtype, q.shape, True)
    torch.testing.assert_close(got.double(), wanted, rtol=EPS[q.dtype], atol=1e-6)


def assert_written(
    given: dict[str, Any],
    slots: Any,
    guarded: Guarded,
    form: str = "plain",
    widths: Widths = SMALL,
    pairs: str = "interleaved",
) -> None:
    """The query is normed, each entry goes to its slot, and nothing else is written to."""
    assert_query(write(given, guarded, slots, pairs), given)
    inside = {int(slot): token for token, slot in enumerate(slots) if 0 <= slot < 24}
    for slot, token in inside.items():
        assert_entry(guarded, slot, given, token, form, widths, pairs)
    assert guarded.unwritten([*inside])


# ---- what they compute -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("widths", "layout"),
    [(DEEPSEEK, "pages of 8"), *((Widths(96, 128, 16), layout) for layout in LAYOUTS)],
    ids=["deepseek", *LAYOUTS],
)
@pytest.mark.parametrize("form", FORMS)
def test_the_query_is_normed_and_each_entry_goes_to_its_slot(
    backend: str, widths: Widths, form: str, layout: str
) -> None:
    given = latents(widths, 4, torch.bfloat16, DEVICE)
    assert_written(given, [7, 0, 23, 8], cache_for(form, widths, torch.bfloat16, layout), form, widths)


@pytest.mark.parametrize("backend", ["triton"], indirect=True)
@pytest.mark.parametrize("form", FORMS)
def test_one_program_has_both_sides_of_a_token_where_there_are_many(
    backend: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "regime", lambda _: 3)
    widths = Widths(160, 128, 16)
    given = latents(widths, 4, torch.bfloat16, DEVICE)
    assert_written(given, [7, 0, 23, 8], cache_for(form, widths, torch.bfloat16), form, widths)


@pytest.mark.parametrize("pairs", PAIRS)
@pytest.mark.parametrize("dtype", list(EPS), ids=str)
def test_all_pairs_and_dtypes(backend: str, dtype: torch.dtype, pairs: str) -> None:
    given = latents(SMALL, 3, dtype, DEVICE)
    assert_written(given, [2, 1, 5], cache_for("plain", SMALL, dtype), pairs=pairs)


@pytest.mark.parametrize("form", ["plain", "fp8"])
def test_entries_may_start_anywhere(backend: str, form: str) -> None:
    """Not on 16 bytes, as those of a cache with odd gaps."""
    given = latents(SMALL, 3, torch.bfloat16, DEVICE)
    assert_written(given, [23, 8, 7], cache_for(form, SMALL, torch.bfloat16, gap=3), form)


@pytest.mark.parametrize("leading", [(6,), (2, 3), ()], ids=str)
def test_any_leading_dimensions(backend: str, leading: tuple[int, ...]) -> None:
    """Positions and slots count the tokens through."""
    count = max(1, torch.Size(leading).numel())
    flat = latents(SMALL, count, torch.bfloat16, DEVICE)
    rows = {name: flat[name].reshape(*leading, -1) for name in ("q", "kv", "k_rope")}
    guarded = cache_for("plain", SMALL, torch.bfloat16)
    got = write({**flat, **rows}, guarded, list(range(count)))
    assert got.shape == (*leading, SMALL.q)
    assert_query(got.view(count, -1), flat)
    for token in range(count):
        assert_entry(guarded, token, flat, token, "plain", SMALL)


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("table", [torch.float32, torch.bfloat16], ids=str)
def test_indices_and_tables_of_other_dtypes(backend: str, table: torch.dtype, index: torch.dtype) -> None:
    given = latents(SMALL, 3, torch.bfloat16, DEVICE)
    given["cos"], given["sin"] = tables(64, SMALL.rope, DEVICE, table)
    given["positions"] = given["positions"].to(index)
    assert_written(given, torch.tensor([4, 3, 2], dtype=index), cache_for("plain", SMALL, torch.bfloat16))


def test_zero_centred_weights_and_their_offsets(backend: str) -> None:
    given = latents(SMALL, 2, torch.bfloat16, DEVICE) | {"q_weight_offset": 1.0, "kv_weight_offset": 2.0}
    assert_written(given, [0, 1], cache_for("plain", SMALL, torch.bfloat16))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("static", {"scale": 0.03125, "dtype": torch.float8_e4m3fn}),
        ("per_token", {"use_ue8m0": False}),
        ("per_token", {"use_ue8m0": True}),
        ("group", {"group_size": 32}),
        ("group", {"group_size": 32, "column_major": True, "tma_aligned": True}),
    ],
    ids=str,
)
def test_the_query_latent_quantised_is_that_of_the_dual_norm(backend: str, name: str, options: dict[str, Any]) -> None:
    """And the entries are those of the plain form, byte for byte."""
    given = latents(SMALL, 3, torch.bfloat16, DEVICE)
    if "scale" in options:
        options = {**options, "scale": scale_of(options["scale"])}
        given |= {"q_weight_offset": 0.0, "kv_weight_offset": 0.0}
    plain, guarded = cache_for("plain", SMALL, torch.bfloat16), cache_for("plain", SMALL, torch.bfloat16)
    write(given, plain, [3, 4, 5])
    got = write(given, guarded, [3, 4, 5], name=f"_{name}_quant", **options)
    dual = ("q", "kv", "q_weight", "kv_weight", "q_epsilon", "kv_epsilon", "q_weight_offset", "kv_weight_offset")
    shared = {key: given[key] for key in dual if key in given}
    wanted = getattr(ops, f"mla_dual_rms_norm_{name}_quant")(**shared, **options)
    assert torch.equal(guarded.buffer, plain.buffer)
    for one, other in zip(got if isinstance(got, tuple) else (got,), wanted[:-1], strict=True):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        assert torch.equal(one.float(), other.float())


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", list(EPS), ids=str)
def test_a_latent_in_an_entry_is_that_of_the_dual_norm(backend: str, dtype: torch.dtype, offset: float) -> None:
    """Bit for bit: both kernels multiply by weight and scale in one order."""
    given, guarded = latents(SMALL, 8, dtype, DEVICE), cache_for("plain", SMALL, dtype)
    given |= {"q_weight_offset": offset, "kv_weight_offset": offset}
    write(given, guarded, list(range(8)))
    dual = ("q", "kv", "q_weight", "kv_weight", "q_epsilon", "kv_epsilon", "q_weight_offset", "kv_weight_offset")
    _, wanted = ops.mla_dual_rms_norm(**{key: given[key] for key in dual})
    assert torch.equal(torch.stack([guarded.entry(token).view(dtype)[: SMALL.kv] for token in range(8)]), wanted)


def assert_quantised(got: torch.Tensor, scaled: torch.Tensor, backend: str) -> None:
    """Bit for bit; but for ties, carries and small values, which Triton's interpreter converts to fp8 otherwise than GPUs."""
    wanted = scaled.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    right = got.view(torch.uint8) == wanted
    if backend == "triton" and not GPU:
        tie = scaled.contiguous().view(torch.int32) & 0xFFFFF == 0x80000
        right |= tie | (wanted & 7 == 0) | (scaled.abs() < 2.0**-6)
    assert right.all()


@pytest.mark.parametrize("form", ["fp8", "fp8_ds_mla"])
def test_an_entry_in_fp8_is_that_of_a_plain_cache_quantised(backend: str, form: str) -> None:
    widths = Widths(96, 128, 16)
    given = latents(widths, 3, torch.bfloat16, DEVICE)
    plain, guarded = (cache_for(each, widths, torch.bfloat16) for each in ("plain", form))
    for cache in (plain, guarded):
        write(given, cache, [3, 4, 5])
    for slot in (3, 4, 5):
        rows, entry = plain.entry(slot).view(torch.bfloat16).float(), guarded.entry(slot)
        if form == "fp8":
            assert_quantised(entry, rows / SCALE, backend)
            continue
        values, scale, rope = entry.split([128, 4, 32])
        scale = scale.clone().view(torch.float32)
        torch.testing.assert_close(scale, rows[:128].abs().amax(-1, True) / 448, rtol=1e-6, atol=0)
        assert_quantised(values, rows[:128] * (1 / scale), backend)
        assert torch.equal(rope.clone().view(torch.bfloat16).float(), rows[128:])


def test_a_query_in_fp8_is_the_plain_one_quantised(backend: str) -> None:
    given = heads(SMALL, 3, 5)
    got = ops.mla_query_concat_static_quant(**given, scale=scale_of())
    assert_quantised(got, ops.mla_query_concat(**given).float() / SCALE, backend)


# ---- the rules -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "slots", [[-1, 6, -(2**31)], [24, 2**40, 23], []], ids=["below zero", "behind it", "no tokens"]
)
def test_a_slot_outside_the_cache_writes_nothing_and_still_gives_a_query(
    backend: str, form: str, slots: list[int]
) -> None:
    widths = Widths(96, 128, 16)
    given = latents(widths, len(slots), torch.bfloat16, DEVICE)
    assert_written(given, torch.tensor(slots, dtype=torch.int64), cache_for(form, widths, torch.bfloat16), form, widths)


def test_of_two_tokens_in_one_slot_each_column_is_of_one_of_them(backend: str) -> None:
    given, guarded = latents(SMALL, 3, torch.bfloat16, DEVICE), cache_for("plain", SMALL, torch.bfloat16)
    alone = []
    for token in range(2):
        other = cache_for("plain", SMALL, torch.bfloat16)
        write(given, other, [5 if i == token else -1 for i in range(3)])
        alone.append(other.entry(5).view(torch.bfloat16))
    write(given, guarded, [5, 5, 6])
    entry = guarded.entry(5).view(torch.bfloat16)
    assert ((entry == alone[0]) | (entry == alone[1])).all()
    assert guarded.unwritten([5, 6])


@pytest.mark.parametrize("position", [-1, 64, 2**40])
def test_a_position_outside_the_tables_is_an_error_or_nan_and_never_a_stray_write(backend: str, position: int) -> None:
    given, guarded = latents(SMALL, 2, torch.bfloat16, DEVICE), cache_for("plain", SMALL, torch.bfloat16)
    given["positions"][0] = position
    if backend == "reference":
        if not GPU:
            with pytest.raises(ValueError, match=f"position {position} lies outside the 64 rows"):
                write(given, guarded, [3, 4])
            assert guarded.unwritten([])
        return
    assert_query(write(given, guarded, [3, 4]), given)
    entry = guarded.entry(3).view(torch.bfloat16)
    assert entry[SMALL.kv :].isnan().all() and not entry[: SMALL.kv].isnan().any()
    assert_entry(guarded, 4, given, 1, "plain", SMALL)
    assert guarded.unwritten([3, 4])


def test_the_position_of_a_token_without_a_slot_is_not_looked_at(backend: str) -> None:
    given = latents(SMALL, 2, torch.bfloat16, DEVICE)
    given["positions"][0] = 2**40
    assert_written(given, [-1, 4], cache_for("plain", SMALL, torch.bfloat16))


@pytest.mark.parametrize("form", FORMS)
def test_a_broken_latent_is_not_hidden_behind_a_finite_entry(backend: str, form: str) -> None:
    widths = Widths(96, 128, 16)
    given, guarded = latents(widths, 2, torch.bfloat16, DEVICE), cache_for(form, widths, torch.bfloat16)
    if form != "plain" and backend == "triton" and not GPU:
        pytest.skip("Triton's interpreter converts NaN to a finite fp8")
    given["kv"][0, 3] = float("nan")
    write(given, guarded, [0, 1])
    got = entry_values(guarded.entry(0), form, widths, torch.bfloat16, SCALE)
    assert got[: widths.kv].isnan().all() and not got[widths.kv :].isnan().any()
    assert_entry(guarded, 1, given, 1, form, widths)


# ---- the query -------------------------------------------------------------------------------------------------------


def heads(widths: Widths, tokens: int, count: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """As a layer has them: the absorbed latent head by head, the rope columns behind others."""
    generator = torch.Generator().manual_seed(1)
    latent = torch.randn(count, tokens, widths.kv, generator=generator).to(dtype).to(DEVICE)
    query = torch.randn(tokens, count, 32 + widths.rope, generator=generator).to(dtype).to(DEVICE)
    cos, sin = tables(64, widths.rope, DEVICE)
    positions = torch.randint(0, 64, (tokens,), generator=generator).to(DEVICE)
    return {
        "q_latent": latent.transpose(0, 1),
        "q_rope": query[..., 32:],
        "cos": cos,
        "sin": sin,
        "positions": positions,
    }


def both(given: dict[str, Any], pairs: str) -> torch.Tensor:
    turned = rotated(given["q_rope"], given["cos"], given["sin"], given["positions"], pairs)
    return torch.cat([given["q_latent"].double(), turned], -1)


@pytest.mark.parametrize(
    ("widths", "heads_of", "pairs"), in_turn([DEEPSEEK, SMALL], [(1, 16), (40, 8), (3, 5)], PAIRS), ids=str
)
def test_the_query_is_the_latent_beside_the_turned_columns(
    backend: str, widths: Widths, heads_of: tuple[int, int], pairs: str
) -> None:
    tokens, count = heads_of
    given = heads(widths, tokens, count)
    got = ops.mla_query_concat(**given, pairs=pairs)
    assert got.shape == (tokens, count, widths.kv + widths.rope) and got.is_contiguous()
    torch.testing.assert_close(got.double(), both(given, pairs), rtol=EPS[torch.bfloat16], atol=1e-6)
    assert torch.equal(got[..., : widths.kv], given["q_latent"])


def test_the_query_in_fp8(backend: str) -> None:
    given = heads(SMALL, 3, 5)
    given["q_latent"][0, 0, 1] = 1e4
    if backend == "reference" or GPU:  # the interpreter converts NaN to a finite fp8
        given["q_latent"][0, 0, 0] = float("nan")
    got = ops.mla_query_concat_static_quant(**given, scale=scale_of())
    assert (got.dtype, got.shape) == (torch.float8_e4m3fn, (3, 5, SMALL.kv + SMALL.rope))
    wanted = both(given, "interleaved").clamp(-448 * SCALE, 448 * SCALE)
    assert_fp8(got.double() * SCALE, wanted, SCALE * 2**-9)
    assert torch.equal(got.isnan(), wanted.isnan())


def test_the_rope_alone_is_written_to_the_last_columns_and_nowhere_else(backend: str) -> None:
    given = heads(SMALL, 3, 5)
    latent = given.pop("q_latent")
    width = SMALL.kv + SMALL.rope
    buffer = torch.full((3, 7, width + 8), 3.0, dtype=torch.bfloat16, device=DEVICE)
    query = buffer[:, 1:6, :width]
    assert ops.mla_query_rope(query=query, **given) is None
    wanted = both({**given, "q_latent": latent}, "interleaved")[..., SMALL.kv :]
    torch.testing.assert_close(query[..., SMALL.kv :].double(), wanted, rtol=EPS[torch.bfloat16], atol=1e-6)
    query[..., SMALL.kv :] = 3.0
    assert (buffer == 3.0).all()


@pytest.mark.parametrize("pairs", ["interleaved", "halves", "interleaved_to_halves"])
def test_the_last_columns_of_the_buffer_itself_are_turned_in_place(backend: str, pairs: str) -> None:
    given = heads(SMALL, 3, 5)
    query = torch.cat([given.pop("q_latent"), given.pop("q_rope")], -1)
    wanted = query.clone()
    ops.mla_query_rope(query[..., SMALL.kv :].clone(), wanted, **given, pairs=pairs)
    ops.mla_query_rope(query[..., SMALL.kv :], query, **given, pairs=pairs)
    assert torch.equal(query, wanted)


@pytest.mark.parametrize("position", [-1, 64])
def test_a_query_at_a_position_outside_the_tables(backend: str, position: int) -> None:
    given = heads(SMALL, 2, 3)
    given["positions"][0] = position
    if backend == "reference":
        if not GPU:
            with pytest.raises(ValueError, match=f"position {position} lies outside the 64 rows"):
                ops.mla_query_concat(**given)
        return
    got = ops.mla_query_concat(**given)
    assert got[0, :, SMALL.kv :].isnan().all() and not got[0, :, : SMALL.kv].isnan().any()
    assert not got[1].isnan().any()


@pytest.mark.parametrize("name", ["mla_query_concat", "mla_query_concat_static_quant"])
def test_no_tokens_give_no_query(backend: str, name: str) -> None:
    more = {"scale": scale_of()} if name.endswith("quant") else {}
    assert getattr(ops, name)(**heads(SMALL, 0, 3), **more).shape == (0, 3, SMALL.kv + SMALL.rope)


# ---- arguments, and what torch is told -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"positions": torch.zeros(2, dtype=torch.int64)}, "positions must have one number for each of the 3 tokens of k_rope"),
        ({"slots": torch.zeros(3)}, "slots must be one of torch.int32, torch.int64, got torch.float32"),
        ({"cos": torch.zeros(4, 9)}, r"cos must be \(positions, 8\), half as wide as k_rope; got \(4, 9\)"),
        ({"sin": torch.zeros(8, 4).t()}, r"sin has stride 4 along its last dimension"),
        ({"cache": torch.zeros(4, 81)}, "cache is torch.float32: expected torch.bfloat16 as the latent"),
        ({"cache": torch.zeros(4, 81, dtype=torch.bfloat16)}, r"entries of 81 elements; plain entries of 64 \+ 16 columns have 80"),
        ({"cache": torch.zeros(4, 8, 1, 80, dtype=torch.bfloat16)}, "a dimension of heads has one head: squeeze it"),
        ({"cache": torch.zeros(4, 100, dtype=torch.uint8)}, "fp8_ds_mla has a scale per 128 columns, and the latent has 64"),
        ({"cache_scale": torch.ones(2)}, "cache_scale must be one element of torch.float32"),
        ({"pairs": "pairs"}, "pairs must be one of interleaved, halves, interleaved_to_halves, none, got pairs"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(change: dict[str, Any], says: str) -> None:
    cache = torch.zeros(4, 8, 80, dtype=torch.bfloat16)
    given = latents(SMALL, 3, torch.bfloat16, "cpu") | {
        "slots": torch.arange(3),
        "cache": cache,
        "cache_scale": torch.ones(1),
    }
    with pytest.raises(ValueError, match=says):
        ops.mla_norm_rope_cache(**{**given, **change})
    assert (cache == 0).all()


def test_a_buffer_that_the_rope_would_fill_is_refused() -> None:
    given = heads(SMALL, 2, 3)
    given.pop("q_latent")
    with pytest.raises(ValueError, match="query must be wider than q_rope, 16 columns"):
        ops.mla_query_rope(query=given["q_rope"].clone(), **given)


def arguments_of(name: str) -> tuple[Any, ...]:
    """All arguments by position, as the op itself takes them."""
    if name == "mla_norm_rope_cache":
        given = latents(SMALL, 3, torch.bfloat16, DEVICE)
        cache = torch.zeros(4, 8, 80, dtype=torch.bfloat16, device=DEVICE)
        return (*given.values(), torch.arange(3, device=DEVICE), cache, scale_of(), 0.0, 0.0, "interleaved")
    given = heads(SMALL, 3, 5)
    if name == "mla_query_rope":
        query = torch.zeros(3, 5, 80, dtype=torch.bfloat16, device=DEVICE)
        return (given["q_rope"], query, given["cos"], given["sin"], given["positions"], "interleaved")
    return (*given.values(), "interleaved")


@pytest.mark.parametrize("name", ["mla_norm_rope_cache", "mla_query_concat", "mla_query_rope"])
def test_torch_is_told_what_is_written_to(name: str) -> None:
    """torch's own checks: the schema against what a call writes to, the fake, and tracing with functional tensors."""
    with torch.no_grad():
        torch.library.opcheck(
            getattr(torch.ops.layerfuse, name).default,
            arguments_of(name),
            test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
        )


def test_more_tokens_than_before_and_fewer(backend: str) -> None:
    """Each size is written whole, whatever was launched before it."""
    for tokens in (1, 5, 20, 2):
        given, guarded = latents(SMALL, tokens, torch.bfloat16, DEVICE), cache_for("plain", SMALL, torch.bfloat16)
        slots = list(range(tokens))
        assert_query(write(given, guarded, slots), given)
        for token in slots:
            assert_entry(guarded, token, given, token, "plain", SMALL)
        assert guarded.unwritten(slots)


def test_autograd_learns_of_the_write() -> None:
    cache = torch.zeros(4, 8, 80, dtype=torch.bfloat16, device=DEVICE)
    given = latents(SMALL, 3, torch.bfloat16, DEVICE)
    before = cache._version
    with torch.no_grad():
        ops.mla_norm_rope_cache(**given, slots=torch.arange(3, device=DEVICE), cache=cache, cache_scale=scale_of())
    assert cache._version == before + 1


@pytest.mark.usefixtures("_op_by_op")
def test_a_compiled_function_writes_to_the_callers_cache() -> None:
    given = latents(SMALL, 3, torch.bfloat16, DEVICE)
    slots, scale = torch.tensor([4, -1, 9], device=DEVICE), scale_of()

    def step(cache: torch.Tensor) -> torch.Tensor:
        query = ops.mla_norm_rope_cache(**given, slots=slots, cache=cache, cache_scale=scale)
        return query + cache.sum()

    eager, compiled = (torch.zeros(4, 8, 80, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    with torch.no_grad():
        expected = step(eager)
        assert torch.equal(torch.compile(step, fullgraph=True)(compiled), expected)
    assert torch.equal(compiled, eager) and eager.any()


@pytest.mark.parametrize("contiguous", [True, False])
def test_the_query_goes_to_a_given_buffer_and_the_entries_to_the_cache(backend: str, contiguous: bool) -> None:
    """Bit by bit what the op gives that allocates its result."""
    given = latents(SMALL, 4, torch.bfloat16, DEVICE)
    slots, caches = [7, -1, 23, 8], [cache_for("plain", SMALL, torch.bfloat16) for _ in range(2)]
    wanted = write(given, caches[0], slots)
    buffer = torch.full((6, SMALL.q + 8), 3.0, dtype=torch.bfloat16, device=DEVICE)
    q_out = buffer[1:5, : SMALL.q] if not contiguous else buffer.view(-1)[: 4 * SMALL.q].view(4, SMALL.q)
    offsets = {"q_weight_offset": 0.0, "kv_weight_offset": 0.0}
    assert write({**offsets, **given}, caches[1], slots, name="_into", q_out=q_out) is None
    assert torch.equal(q_out, wanted)
    assert torch.equal(caches[1].buffer, caches[0].buffer)
    assert caches[1].unwritten([7, 23, 8])
    q_out.fill_(3.0)
    assert bool((buffer == 3.0).all())
