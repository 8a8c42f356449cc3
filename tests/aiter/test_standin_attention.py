"""The stand-ins' attention metadata and decode: sizes by release, numbers against plain attention, and misuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from standin import RELEASES, StandInMisuse
from standin.behaviour import Call
from standin.behaviour_decode import check_heads
from standin.mla_sizes import mla_shapes
from torch import Tensor

BF16, E4M3FN, FNUZ = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz
NAMES = (
    "work_metadata_ptrs",
    "work_indptr",
    "work_info_set",
    "reduce_indptr",
    "reduce_final_map",
    "reduce_partial_map",
)
RANK, WIDTH, HEADS = 64, 48, 16


def sizes(release: str, arch: str, *arguments: Any) -> list[Any]:
    """work_indptr, W, reduce_indptr and R, as the record tells its examples."""
    shapes = [shape for shape, _ in mla_shapes(release, arch, *arguments)]
    return [shapes[1], shapes[2][0], shapes[3], shapes[5]]


@pytest.mark.parametrize(
    ("release", "arch", "arguments", "partial"),
    [
        ("v0.1.16.post6", "gfx950", (64, 1, 64, BF16, BF16), 1276),
        ("v0.1.17-rc0", "gfx950", (64, 1, 64, BF16, BF16), 319),
        ("v0.1.17", "gfx942", (64, 1, 64, FNUZ, FNUZ), 1468),
        ("v0.1.18", "gfx942", (64, 1, 64, FNUZ, FNUZ), 367),
        ("v0.1.20", "gfx950", (64, 4, 32, E4M3FN, E4M3FN), 319),
        ("v0.1.20", "gfx942", (64, 1, 128, BF16, BF16), 2936),
    ],
)
def test_sizes_change_from_release_to_release(
    release: str, arch: str, arguments: tuple[Any, ...], partial: int
) -> None:
    assert sizes(release, arch, *arguments, False, True)[3] == partial


def test_head_counts_that_are_refused() -> None:
    assert mla_shapes("v0.1.20", "gfx942", 1, 1, 24, BF16, BF16, False, True)
    with pytest.raises(AssertionError):
        mla_shapes("v0.1.20", "gfx942", 1, 1, 20, BF16, BF16, False, True)


def test_a_cap_on_splits_and_a_fixed_number_of_them() -> None:
    case = ("gfx950", 512, 1, 16, BF16, BF16, False, True, 32, False, 4)
    assert mla_shapes("v0.1.16.post6", *case)[5][0] == 512 * 256
    assert mla_shapes("v0.1.17", *case)[5][0] == 512 + 256
    fixed = mla_shapes("v0.1.20", "gfx950", 8, 1, 16, BF16, BF16, False, True, 4, True)
    assert (fixed[2][0], fixed[5][0]) == ((32, 8), 32)


def test_shapes_are_ints_where_they_have_one_dimension(aiter_of: Callable[..., Any]) -> None:
    found = aiter_of("v0.1.20", arch="gfx942").get_mla_metadata_info_v1(64, 1, 16, BF16, BF16, False)
    assert found == mla_shapes("v0.1.20", "gfx942", 64, 1, 16, BF16, BF16, False, True)
    assert found[0] == (2, torch.uint64) and isinstance(found[1][0], int)
    with pytest.raises(StandInMisuse, match="no dtype"):
        aiter_of("v0.1.20").get_mla_metadata_info_v1(64, 1, 16, "bf16", "bf16", False)
    with pytest.raises(StandInMisuse, match="is_sparse"):
        aiter_of("v0.1.20").get_mla_metadata_info_v1(64, 1, 16, BF16, BF16, 0)


class Request:
    """Three requests over a paged cache, with buffers of the release's own sizes."""

    def __init__(self, package: Any, release: str, page: int = 1, longest: int = 1, heads: int = HEADS) -> None:
        generator = torch.Generator().manual_seed(longest)
        self.package, self.release, self.page, self.longest, self.heads = package, release, page, longest, heads
        self.q = torch.randn(3 * longest, heads, RANK, generator=generator).bfloat16()
        self.cache = torch.randn(12, page, 1, RANK, generator=generator).bfloat16()
        self.o = torch.zeros(3 * longest, heads, WIDTH, dtype=BF16)
        self.starts = torch.tensor([0, 1, 2, 3], dtype=torch.int32) * longest
        self.pages = torch.tensor([0, 5, 7, 12], dtype=torch.int32)
        self.indices = torch.randperm(12, generator=generator).int()
        self.last = torch.tensor([1, page, max(1, page - 1)], dtype=torch.int32)
        shapes = package.get_mla_metadata_info_v1(3, longest, heads, BF16, BF16, False)
        self.buffers = {
            name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in zip(NAMES, shapes, strict=True)
        }

    def plan(self, **changes: Any) -> None:
        given: dict[str, Any] = {"seqlens_qo_indptr": self.starts, "seqlens_kv_indptr": self.pages}
        given |= {"kv_last_page_lens": self.last, "page_size": self.page}
        given |= {
            "num_heads_per_head_k": self.heads,
            "num_heads_k": 1,
            "is_causal": True,
            "max_seqlen_qo": self.longest,
        }
        self.package.get_mla_metadata_v1(**{**given, **self.buffers, **changes})

    def decode(self, **changes: Any) -> Any:
        given: dict[str, Any] = {"q": self.q, "kv_buffer": self.cache, "o": self.o, "qo_indptr": self.starts}
        given |= {"kv_indptr": self.pages, "kv_indices": self.indices, "kv_last_page_lens": self.last}
        given |= {"max_seqlen_q": self.longest, "sm_scale": 0.125}
        given |= {"page_size": self.page} if self.page > 1 else {}
        given |= {"work_meta_data" if name == NAMES[0] else name: buffer for name, buffer in self.buffers.items()}
        return self.package.mla.mla_decode_fwd(**{**given, **changes})

    def expected(self) -> Tensor:
        results = []
        for request in range(3):
            pages = self.indices[self.pages[request] : self.pages[request + 1]].long()
            length = (len(pages) - 1) * self.page + int(self.last[request])
            keys = self.cache[pages].double().reshape(-1, RANK)[:length]
            for token in range(self.longest):
                seen = keys[: length - self.longest + token + 1]
                weights = (self.q[request * self.longest + token].double() @ seen.t() * 0.125).softmax(-1)
                results.append(weights @ seen[:, :WIDTH])
        return torch.stack(results)

    def holds(self, found: Tensor) -> None:
        torch.testing.assert_close(found.double(), self.expected(), rtol=8e-3, atol=1e-2)


@pytest.mark.parametrize("release", RELEASES)
def test_the_decode_attends_as_its_metadata_says(aiter_of: Callable[..., Any], release: str) -> None:
    case = Request(aiter_of(release), release)
    case.plan()
    assert case.decode()[1] is None
    case.holds(case.o)
    assert bool(case.decode(return_lse=True)[1].isfinite().all())


@pytest.mark.parametrize("release", ["v0.1.16.post3", "v0.1.20"])
@pytest.mark.parametrize("longest", [1, 2])
def test_pages_and_several_query_tokens(aiter_of: Callable[..., Any], release: str, longest: int) -> None:
    case = Request(aiter_of(release), release, page=4, longest=longest)
    case.plan()
    case.decode()
    case.holds(case.o)
    with pytest.raises(StandInMisuse, match="the metadata is for"):
        case.decode(page_size=4, max_seqlen_q=longest + 1)
    with pytest.raises(StandInMisuse, match="page_size is 1"):
        case.decode(page_size=1)


def test_the_fold_of_several_tokens_gives_o_new_memory(aiter_of: Callable[..., Any]) -> None:
    case = Request(aiter_of("v0.1.20", arch="gfx942"), "v0.1.20", longest=2, heads=32)
    case.plan()
    view, before = case.o.view(-1), case.o.data_ptr()
    case.decode()
    case.holds(case.o)
    assert case.o.data_ptr() != before
    assert not torch.equal(view, case.o.view(-1))


def test_the_swapped_buffers_are_caught(aiter_of: Callable[..., Any]) -> None:
    case = Request(aiter_of("v0.1.20"), "v0.1.20")
    with pytest.raises(StandInMisuse, match="another buffer's position"):
        case.plan(work_info_set=case.buffers["work_indptr"], work_indptr=case.buffers["work_info_set"])


def test_what_the_builder_takes_on_trust(aiter_of: Callable[..., Any]) -> None:
    case = Request(aiter_of("v0.1.20"), "v0.1.20")
    small = case.buffers["work_info_set"][:-1]
    for change, message in (
        ({"work_info_set": small}, "written past its end"),
        ({"reduce_indptr": case.buffers["reduce_indptr"].double()}, "is written"),
        ({"dtype_q_nope": BF16}, "another parameter's position"),
        ({"mla_version": BF16}, "a dtype passed there"),
        ({"uni_seqlen_qo": 2}, "requests have"),
        ({"kv_last_page_lens": case.last[:2]}, "one length per request"),
        ({"num_heads_per_head_k": 1, "num_heads_k": 16}, "one latent head"),
        ({"max_split_per_batch": 256}, "written past its end"),
    ):
        with pytest.raises(StandInMisuse, match=message):
            case.plan(**change)
    for change, message in (
        ({"seqlens_qo_indptr": case.starts.long()}, "should be int"),
        ({"kv_granularity": 12}, "power of 2"),
        ({"page_size": 3}, "power of 2"),
    ):
        with pytest.raises(RuntimeError, match=message):
            case.plan(**change)


def test_what_the_decode_refuses(aiter_of: Callable[..., Any]) -> None:
    case = Request(aiter_of("v0.1.20"), "v0.1.20")
    with pytest.raises(StandInMisuse, match="filled as such"):
        case.decode()
    case.plan()
    clone = case.buffers["work_indptr"].clone()
    refusals: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"work_indptr": clone}, StandInMisuse, "points to other buffers"),
        ({"logit_cap": 30.0}, AssertionError, "not support yet"),
        ({"q": case.q.transpose(0, 1).contiguous().transpose(0, 1)}, RuntimeError, "q must be contiguous"),
        ({"q": case.q.half()}, RuntimeError, "has no kernel"),
        ({"o": case.o.float()}, StandInMisuse, "but bfloat16 is written"),
        ({"page_size": 0.125}, StandInMisuse, "page_size is 0.125"),
        ({"kv_indices": case.indices + 1}, StandInMisuse, "outside the cache"),
        ({"kv_indices": case.indices.long()}, RuntimeError, "int32"),
        ({"kv_last_page_lens": case.last * 2}, StandInMisuse, "kv_last_page_lens"),
        ({"kv_buffer": case.cache[..., :32]}, RuntimeError, "head size"),
    ]
    for change, error, message in refusals:
        with pytest.raises(error, match=message):
            case.decode(**change)


def test_heads_that_no_kernel_takes(aiter_of: Callable[..., Any]) -> None:
    with pytest.raises(RuntimeError, match="num_heads 24 not supported"):
        Request(aiter_of("v0.1.20", arch="gfx942"), "v0.1.20", heads=24).plan()
    native = Request(aiter_of("v0.1.16.post3"), "v0.1.16.post3", heads=24)
    native.plan()
    native.decode()
    native.holds(native.o)


@pytest.mark.parametrize(
    ("release", "arch", "dtype", "heads", "longest", "moved"),
    [
        ("v0.1.20", "gfx942", BF16, 256, 1, None),
        ("v0.1.20", "gfx942", BF16, 48, 2, True),
        ("v0.1.20", "gfx950", BF16, 48, 2, False),
        ("v0.1.16.post3", "gfx950", E4M3FN, 64, 2, False),
        ("v0.1.20", "gfx950", E4M3FN, 48, 2, True),
        ("v0.1.19.post2", "gfx950", E4M3FN, 32, 3, True),
        ("v0.1.20", "gfx950", E4M3FN, 32, 3, False),
        ("v0.1.20", "gfx942", FNUZ, 8, 1, None),
        ("v0.1.20", "gfx942", BF16, 8, 2, False),
    ],
)
def test_which_head_counts_are_refused_folded_and_moved(
    release: str, arch: str, dtype: torch.dtype, heads: int, longest: int, moved: bool | None
) -> None:
    tensor = torch.zeros(1, dtype=dtype)
    call = Call("aiter.mla:mla_decode_fwd", release, arch, {"q": tensor, "kv_buffer": tensor})
    if moved is None:
        with pytest.raises(AssertionError, match="not supported"):
            check_heads(call, heads, longest, True)
    else:
        assert check_heads(call, heads, longest, True) == moved
