"""The ops of an MLA decode layer on a GPU: every number of tokens, CUDA graphs whose batch changes, overlapping launches, large caches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from latent_support import DEEPSEEK, SMALL, Guarded, Widths, latents, normed, rotated, tables

from layerfuse.fusion import backends, ops
from layerfuse.fusion.ops.library import repeating

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TOKENS = [1, 2, 8, 64, 128, 129, 384, 385, 640, 641, 1024, 1025, 3072, 3073, 8192, 8193]
UNIT = 2**-7


@pytest.fixture(autouse=True)
def _triton() -> Iterator[None]:
    backends.force("triton")
    yield
    backends.force(None)


def scale() -> torch.Tensor:
    return torch.tensor([0.0625], device="cuda")


@pytest.mark.parametrize("form", ["plain", "fp8", "fp8_ds_mla"])
@pytest.mark.parametrize("widths", [DEEPSEEK, Widths(96, 128, 16)], ids=["deepseek", "narrow"])
@pytest.mark.parametrize("tokens", TOKENS)
def test_every_number_of_tokens_writes_what_the_reference_writes(tokens: int, widths: Widths, form: str) -> None:
    given = latents(widths, tokens, torch.bfloat16, "cuda")
    pages = -(-tokens // 64) + 1
    slots = torch.randperm(pages * 64, device="cuda")[:tokens]
    slots[::7] = -1
    guarded = [
        Guarded.of(form, widths, pages=pages, page_size=64, dtype=torch.bfloat16, device="cuda") for _ in range(2)
    ]
    for _ in range(2):  # the second time without Triton's search
        query = ops.mla_norm_rope_cache(**given, slots=slots, cache=guarded[0].cache, cache_scale=scale())
    wanted = normed(given["q"], given["q_weight"], given["q_epsilon"])
    torch.testing.assert_close(query.double(), wanted, rtol=UNIT, atol=1e-6)
    backends.force("reference")
    ops.mla_norm_rope_cache(**given, slots=slots, cache=guarded[1].cache, cache_scale=scale())
    wrong = guarded[0].buffer != guarded[1].buffer
    # A value on the edge of two may fall to either side: a byte of it differs, and its neighbours do not.
    assert wrong.double().mean() < 2e-3
    taken = {slot for slot in slots.tolist() if slot >= 0}
    assert guarded[0].unwritten(sorted(taken))


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("heads", [1, 16, 128])
def test_every_number_of_heads_of_all_tokens(tokens: int, heads: int) -> None:
    if tokens * heads > 2**18:
        pytest.skip("half a gigabyte of queries shows nothing more")
    latent = torch.randn(heads, tokens, 512, device="cuda", dtype=torch.bfloat16).transpose(0, 1)
    rope = torch.randn(tokens, heads, 192, device="cuda", dtype=torch.bfloat16)[..., 128:]
    cos, sin = tables(64, 64, "cuda")
    positions = torch.randint(0, 64, (tokens,), device="cuda")
    turned = rotated(rope, cos, sin, positions, "interleaved")
    for _ in range(2):
        got = ops.mla_query_concat(latent, rope, cos, sin, positions)
        assert torch.equal(got[..., :512], latent)
        torch.testing.assert_close(got[..., 512:].double(), turned, rtol=UNIT, atol=1e-6)
        buffer = torch.zeros_like(got)
        ops.mla_query_rope(rope, buffer, cos, sin, positions)
        assert torch.equal(buffer[..., 512:], got[..., 512:]) and not buffer[..., :512].any()
        whole = torch.cat([latent, rope], -1)
        ops.mla_query_rope(whole[..., 512:], whole, cos, sin, positions)
        assert torch.equal(whole, got), "turned in place"


@pytest.mark.parametrize("off", [0, 1], ids=["on the grid", "off it"])
@pytest.mark.parametrize("form", ["plain", "fp8"])
@pytest.mark.parametrize("tokens", [1, 65, 2000])
def test_calls_that_are_alike_are_repeated_with_other_tensors(tokens: int, form: str, off: int) -> None:
    """What is launched without a look at anything but where tensors lie: one call with its checks, one by the op, and two repeated."""
    write, rope = repeating("mla_norm_rope_cache_into"), repeating("mla_query_rope")
    dtype = torch.float8_e4m3fn if form == "fp8" else torch.bfloat16
    scale_in, kept = scale(), []
    for seed in (1, 2, 3, 4):
        given = latents(DEEPSEEK, tokens, torch.bfloat16, "cuda", seed=seed)
        memory = torch.zeros(2, tokens * 576 + 8, device="cuda").to(dtype)
        caches = [part[off : off + tokens * 576].view(tokens, 576) for part in memory]
        slots = torch.randperm(tokens, device="cuda")
        outs = torch.zeros(2, *given["q"].shape, device="cuda", dtype=torch.bfloat16)
        for place, call in enumerate([lambda *all_: write((tokens, off), *all_), ops.mla_norm_rope_cache_into]):
            call(*given.values(), slots, caches[place], scale_in, 0.0, 0.0, "interleaved", outs[place])
        assert torch.equal(caches[0].view(torch.uint8), caches[1].view(torch.uint8)) and torch.equal(*outs)
        query = torch.randn(tokens, 16, 192, device="cuda", dtype=torch.bfloat16)
        turned = query.clone()
        tables_of = given["cos"], given["sin"], given["positions"], "interleaved"
        rope((tokens, 16), query[..., 128:], query, *tables_of)
        ops.mla_query_rope(turned[..., 128:].clone(), turned, *tables_of)
        assert torch.equal(query, turned)
        kept.append((given, memory, query))  # so that the next ones lie elsewhere
    with backends.counting() as counted:
        rope((tokens, 16), query[..., 128:], query, *tables_of)
    assert counted == {"mla_query_rope": 1}


def test_a_captured_graph_runs_with_fewer_tokens_and_more_run_beside_it() -> None:
    """As engines do: a graph of 64 tokens whose last ones are padding, then a batch larger than any that was captured."""
    static = latents(DEEPSEEK, 64, torch.bfloat16, "cuda")
    slots = torch.full((64,), -1, device="cuda")
    guarded = Guarded.of("plain", DEEPSEEK, pages=8, page_size=64, dtype=torch.bfloat16, device="cuda")

    def step() -> torch.Tensor:
        return ops.mla_norm_rope_cache(**static, slots=slots, cache=guarded.cache, cache_scale=scale_in)  # type: ignore[no-any-return]

    scale_in = scale()
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        query = step()
    assert guarded.unwritten([])
    for real in (3, 64, 1):
        guarded.buffer.fill_(0xA5)
        slots.fill_(-1)
        slots[:real] = torch.arange(100, 100 + real, device="cuda")
        graph.replay()
        torch.cuda.synchronize()
        wanted = normed(static["q"], static["q_weight"], static["q_epsilon"])
        torch.testing.assert_close(query.double(), wanted, rtol=UNIT, atol=1e-6)
        assert guarded.unwritten(list(range(100, 100 + real)))
        assert (guarded.entry(99 + real) != 0xA5).any()
    more = latents(DEEPSEEK, 500, torch.bfloat16, "cuda", seed=2)
    ops.mla_norm_rope_cache(**more, slots=torch.arange(500, device="cuda"), cache=guarded.cache, cache_scale=scale_in)
    assert guarded.unwritten(list(range(500)))


def test_launches_that_overlap_read_what_the_one_before_wrote() -> None:
    """A chain in which each op needs the other's result, over and over on the same memory."""
    given = latents(DEEPSEEK, 64, torch.bfloat16, "cuda")
    cos, sin = given["cos"], given["sin"]
    buffer = torch.zeros(64, 1, 576, device="cuda", dtype=torch.bfloat16)
    cache = torch.zeros(64, 576, device="cuda", dtype=torch.bfloat16)
    slots, scale_in = torch.arange(64, device="cuda"), scale()
    weights = given["q_weight"], given["kv_weight"]
    results = []
    for wait in (False, True):
        kv, rope = given["kv"].clone(), given["k_rope"].clone()
        for _ in range(50):
            ops.mla_norm_rope_cache(
                given["q"], kv, rope, *weights, 1e-6, 1e-6, cos, sin, given["positions"], slots, cache, scale_in
            )
            if wait:
                torch.cuda.synchronize()
            ops.mla_query_rope(cache[:, None, 512:], buffer, cos, sin, given["positions"])
            if wait:
                torch.cuda.synchronize()
            rope = buffer[:, 0, 512:]
        results.append((cache.clone(), buffer.clone()))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_a_cache_beyond_32_bits_is_written_at_its_end() -> None:
    entries = 2**31 // 576 + 1000
    if torch.cuda.mem_get_info()[0] < entries * 576 * 2 * 1.2:
        pytest.skip("needs 5 GiB of GPU memory")
    cache = torch.zeros(entries, 576, device="cuda", dtype=torch.bfloat16)
    given = latents(DEEPSEEK, 2, torch.bfloat16, "cuda")
    slots = torch.tensor([entries - 1, 5], device="cuda")
    ops.mla_norm_rope_cache(**given, slots=slots, cache=cache, cache_scale=scale())
    small = torch.zeros(2, 576, device="cuda", dtype=torch.bfloat16)
    ops.mla_norm_rope_cache(**given, slots=torch.arange(2, device="cuda"), cache=small, cache_scale=scale())
    assert torch.equal(cache[slots], small)
    assert int(cache.any(1).sum()) == 2


@pytest.mark.parametrize("dynamic", [False, True])
def test_inductor_keeps_the_write_where_it_stands(dynamic: bool) -> None:
    """Between a read of the cache before it and one behind it."""
    given = latents(SMALL, 4, torch.bfloat16, "cuda")
    scale_in = scale()

    def step(cache: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        before = cache.float().sum()
        query = ops.mla_norm_rope_cache(**given, slots=slots, cache=cache, cache_scale=scale_in)
        return before, query + cache.float().sum()

    caches = [torch.zeros(4, 8, 80, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    slots = torch.tensor([3, -1, 9, 30], device="cuda")
    with torch.inference_mode():
        compiled = torch.compile(step, dynamic=dynamic, fullgraph=True)
        for _ in range(2):
            for got, wanted in zip(compiled(caches[0], slots), step(caches[1], slots), strict=True):
                torch.testing.assert_close(got, wanted)
    assert torch.equal(*caches)
