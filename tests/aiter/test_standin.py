"""The stand-ins themselves: they declare what was recorded, and take no call that AITER would misread.

What they compute is held to the references of the ops, wherever a binding is (`test_bindings`).
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from binding_checks import plan_of
from standin import EVERY_REF, RELEASES, StandInMisuse, aliases, definitions, imported, on_path, shared_standin, version
from standin.behaviour_mla import BUFFERS
from standin.recorded import DATA, every_key
from torch import Tensor

RECORDED: dict[str, Any] = json.loads(DATA.read_text())
BF16, FP8, EPS = torch.bfloat16, torch.float8_e4m3fn, 1e-5


def reached(key: str) -> Any:
    module, _, path = key.partition(":")
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found


def exists(key: str) -> bool:
    try:
        reached(key)
    except (ImportError, AttributeError):
        return False
    return True


def written(folder: Path, key: str) -> ast.FunctionDef:
    """The definition of a key in the generated source, found as a reader of files would find it."""
    module, _, path = key.partition(":")
    body = ast.parse((folder / (module.replace(".", "/") + ".py")).read_text()).body
    *owner, name = path.split(".")
    for outer in owner:
        body = next(node.body for node in body if isinstance(node, ast.ClassDef) and node.name == outer)
    return next(node for node in body if isinstance(node, ast.FunctionDef) and node.name == name)


def as_recorded(release: str, key: str) -> dict[str, Any]:
    """The raw entry, looked up without the reader that the generator uses."""
    order = RECORDED["releases"].index
    return next(
        entry for entry in RECORDED["definitions"][key] if order(entry["from"]) <= order(release) <= order(entry["to"])
    )


@pytest.mark.parametrize("release", EVERY_REF)
def test_every_recorded_signature_is_there_and_nothing_else(release: str) -> None:
    """In the source and, where AITER shows it, live."""
    folder = shared_standin(release)
    with imported(folder):
        assert importlib.metadata.version("amd-aiter") == version(release)
        for key, definition in definitions(release).items():
            function, raw = written(folder, key), as_recorded(release, key)
            expected = ast.parse(f"def f({', '.join(raw['parameters'])}): ...").body[0]
            assert isinstance(expected, ast.FunctionDef)
            assert ast.unparse(function.args) == ast.unparse(expected.args), f"{release} {key}"
            assert (None if function.returns is None else ast.unparse(function.returns)) == raw["returns"]
            live = inspect.signature(reached(key))
            if definition.hidden_by:
                assert str(live) == "(*args, **kwargs)", f"{release} {key} can be inspected"
            else:
                assert list(live.parameters) == [parameter.name for parameter in definition.parameters]
        for alias, target in aliases(release).items():
            assert reached(alias) is reached(target), f"{release} {alias}"
        absent = set(every_key()) - set(definitions(release)) - set(aliases(release))
        assert not [key for key in absent if exists(key)]


def test_the_record_is_whole_and_in_order() -> None:
    assert len(RELEASES) == 13 and RECORDED["releases"][-1] == "HEAD"
    for entries in (*RECORDED["definitions"].values(), *RECORDED["aliases"].values()):
        ends = [RECORDED["releases"].index(entry[end]) for entry in entries for end in ("from", "to")]
        assert ends == sorted(ends)


def test_nothing_of_an_import_is_left_behind_and_without_a_folder_none_is_installed() -> None:
    """The folder of these tests has the name of the package, which must not make it one."""
    path, finders = list(sys.path), list(sys.meta_path)
    with imported(shared_standin("v0.1.20")):
        importlib.import_module("aiter.mla")
    assert (sys.path, sys.meta_path) == (path, finders)
    assert not [name for name in sys.modules if name.split(".")[0] == "aiter"]
    with on_path():
        spec = importlib.util.find_spec("aiter")
        assert spec is None or "tests" not in str(spec.submodule_search_locations)


# ---- what AITER would misread, or refuses itself, and no binding asks of it (`test_refusals` makes the calls that one would)


def rows(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def added(x: Tensor, weight: Tensor, *more: Any) -> None:
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    reached("aiter:rmsnorm2d_fwd_with_add")(out, x, out.clone(), out.clone(), weight, EPS, *more)


def dual(q: Tensor, k: Tensor, q_weight: Tensor, q_out: Any = None) -> None:
    of = reached("aiter.ops.fused_qk_norm_rope_cache_quant:_fused_qk_rmsnorm")
    of(q_out, q, q_weight, EPS, None, k, rows(k.shape[-1]), EPS)


def quantised(width: int, group: int, scale: Tensor) -> None:
    reached("aiter:rmsnorm_quant")(rows(2, width).to(FP8), rows(2, width), scale, rows(width), EPS, group)


def grouped(**changes: Any) -> None:
    given = {
        "q_out_quantized": rows(5, 128).to(FP8), "q_out_scale": torch.zeros(5, 4), "q": rows(5, 128), "q_weight": rows(128),
        "q_epsilon": EPS, "q_out_unquantized": rows(5, 128), "k_out": rows(5, 48), "k": rows(5, 48), "k_weight": rows(48),
        "group_size": 32,
    }  # fmt: skip
    reached("aiter:fused_qk_rmsnorm_group_quant")(**{**given, **changes})


def gated(activation: str) -> None:
    of = reached("aiter.ops.triton.quant:fused_rms_gated_fp8_group_quant")
    of(rows(6, 64), rows(64), None, rows(6, 64), EPS, activation=activation)


def of_heads(out: torch.dtype, group: int) -> None:
    of = reached("aiter.ops.gated_rmsnorm_fp8_group_quant:gated_rmsnorm_fp8_group_quant")
    of(rows(5, 384).to(out), torch.zeros(5, 3), rows(5, 3, 128), rows(5, 3, 128), rows(128), EPS, group)


def activated(x: Tensor, group: int = 128) -> None:
    width = x.shape[1] // 2
    reached("aiter:silu_and_mul_quant")(rows(2, width).to(FP8), x, torch.zeros(2, width // group), group)


def reduced(**changes: Any) -> None:
    ranks = reached("aiter.dist.device_communicators.custom_all_reduce:CustomAllreduce")(None, "cpu")
    ranks.fused_ar_rms(**{"inp": rows(4, 512), "res_inp": rows(4, 512), "w": rows(512), "eps": EPS, **changes})


def planned(**changes: Any) -> dict[str, Any]:
    """Buffers of three requests and their plan; and what the decode of it is given."""
    sizes = reached("aiter:get_mla_metadata_info_v1")(3, 1, 16, BF16, BF16, False)
    buffers = plan_of(dict(zip(BUFFERS, sizes, strict=True)))
    if changes.pop("swapped", False):
        buffers["work_info_set"], buffers["work_indptr"] = buffers["work_indptr"], buffers["work_info_set"]
    lengths = torch.arange(4, dtype=torch.int32)
    batch = {"seqlens_qo_indptr": lengths, "seqlens_kv_indptr": lengths, "kv_last_page_lens": rows(3).int()}
    options = {"page_size": 1, "num_heads_per_head_k": 16, "num_heads_k": 1, "is_causal": True, "max_seqlen_qo": 1}
    reached("aiter:get_mla_metadata_v1")(**{**batch, **options, **buffers, **changes})
    buffers["work_meta_data"] = buffers.pop("work_metadata_ptrs")
    return {
        "q": rows(3, 16, 64), "kv_buffer": rows(3, 1, 1, 64), "o": rows(3, 16, 48), "qo_indptr": lengths, "kv_indptr": lengths,
        "kv_indices": lengths[:3], "kv_last_page_lens": rows(3).int(), "max_seqlen_q": 1, "sm_scale": 0.125, **buffers,
    }  # fmt: skip


def decoded(**changes: Any) -> None:
    reached("aiter.mla:mla_decode_fwd")(**{**planned(), **changes})


OLD, NEW = "v0.1.16.post3", "v0.1.20"
MISUSED: tuple[tuple[str, Callable[[], None], type[Exception], str], ...] = (
    (NEW, lambda: added(rows(2, 8), rows(8).float()), StandInMisuse, "read as"),
    (NEW, lambda: added(rows(2, 8), rows(4)), StandInMisuse, "past its end"),
    (OLD, lambda: added(rows(8, 2).t(), rows(8)), StandInMisuse, "last stride"),
    (OLD, lambda: added(rows(2, 8), rows(8), False), StandInMisuse, "another release"),
    (NEW, lambda: added(rows(2, 8), rows(8), 0), StandInMisuse, "another release"),
    (NEW, lambda: added(rows(3, 2, 8, dtype=torch.float32).transpose(0, 1), rows(8).float()), StandInMisuse, "evenly apart"),
    (NEW, lambda: dual(rows(6, 64), rows(5, 32), rows(64)), StandInMisuse, "only q's are counted"),
    (NEW, lambda: dual(rows(0, 64), rows(0, 32), rows(64)), StandInMisuse, "no rows"),
    (NEW, lambda: dual(rows(6, 64), rows(6, 32), rows(64), rows(6, 63)), StandInMisuse, "q_out has shape"),
    (NEW, lambda: dual(rows(6, 64), rows(6, 32), rows(64), 1e-5), TypeError, "must be Tensor"),
    ("v0.1.17", lambda: quantised(64, 32, torch.zeros(2, 2).byte()), StandInMisuse, "float32 is written"),
    (NEW, lambda: grouped(q_out_scale=torch.zeros(5, 3)), RuntimeError, "q_out_scale must be"),
    (NEW, lambda: grouped(q=rows(128, 5).t()), RuntimeError, "stride"),
    (NEW, lambda: grouped(gemma_norm=128), StandInMisuse, "another release"),
    (NEW, lambda: gated("relu"), StandInMisuse, "no gate at all"),
    (NEW, lambda: of_heads(torch.float8_e4m3fnuz, 128), AssertionError, "Unsupported dtype"),
    (NEW, lambda: of_heads(FP8, 64), RuntimeError, "ONLY group_size=128"),
    (NEW, lambda: activated(rows(2, 300)[:, :256]), StandInMisuse, "reads no stride"),
    (NEW, lambda: reduced(res_inp=rows(4, 512).float()), StandInMisuse, "read as"),
    (NEW, lambda: reduced(registered=True), StandInMisuse, "never registered"),
    (OLD, lambda: reduced(inp=rows(81, 512), res_inp=rows(81, 512), use_1stage=True), RuntimeError, "exceeds 80"),
    (NEW, lambda: planned(swapped=True), StandInMisuse, "another buffer's position"),
    (NEW, lambda: planned(max_split_per_batch=256), StandInMisuse, "written past its end"),
    (NEW, lambda: planned(dtype_q_nope=BF16), StandInMisuse, "another parameter's position"),
    (NEW, lambda: planned(page_size=3), RuntimeError, "power of 2"),
    (NEW, lambda: decoded(work_indptr=torch.full((257,), 11, dtype=torch.int32)), StandInMisuse, "points to other buffers"),
    (NEW, lambda: decoded(page_size=4), StandInMisuse, "page_size is 4"),
    (NEW, lambda: decoded(max_seqlen_q=2), StandInMisuse, "the metadata is for"),
    (NEW, lambda: decoded(kv_indices=torch.arange(1, 4).int()), StandInMisuse, "outside the cache"),
    (NEW, lambda: decoded(o=rows(3, 16, 48).float()), StandInMisuse, "bfloat16 is written"),
)  # fmt: skip


@pytest.mark.parametrize(("release", "call", "error", "words"), MISUSED)
def test_what_aiter_would_misread_is_an_error(aiter_of, release, call, error, words):
    aiter_of(release)
    with pytest.raises(error, match=words):
        call()


def test_the_same_calls_without_a_mistake_are_taken(aiter_of: Callable[..., Any]) -> None:
    aiter_of(NEW)
    added(rows(2, 8), rows(8), False)
    dual(rows(6, 64), rows(6, 32), rows(64))
    quantised(4096, 128, torch.zeros(2, 32))
    grouped()
    gated("silu")
    of_heads(FP8, 128)
    activated(rows(2, 256))
    reduced()
    decoded()
