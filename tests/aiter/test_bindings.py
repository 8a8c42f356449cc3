"""Every binding in every release: it works and gives the right numbers, or it is refused for the recorded reason."""

from __future__ import annotations

import ast
import re
import sys
import threading
from pathlib import Path

import pytest
from binding_checks import (
    CALLS,
    check_all_reduce,
    check_numbers,
    mla_decode_of_several_queries,
)
from check_tools import installed
from norm_checks import OPS, WIDTH, check
from standin import RELEASES, StandInMisuse, between, shared_standin

from layerfuse.fusion.backends import BackendError
from layerfuse.fusion.backends import aiter as amd
from layerfuse.fusion.backends.aiter import Bound, Refused
from layerfuse.fusion.backends.aiter.releases import RELEASES as KNOWN
from layerfuse.fusion.latent_ops import MLA
from layerfuse.fusion.linear_ops import LINEARS

NOTHING_FOR = {
    "gated_rms_norm",
    "gated_rms_norm_static_quant",
    *(f"gated_rms_norm_{form}_quant_with_norm" for form in ("static", "per_token", "group")),
    *(f"silu_mul_{form}_quant_with_product" for form in ("static", "per_token", "group")),
    *(f"{add}rms_norm_nvfp4_quant{kept}" for add in ("", "add_") for kept in ("", "_with_norm")),
    "rms_norm_mxfp8_quant_with_norm",
    "add_rms_norm_mxfp8_quant_with_norm",
    "all_reduce_add_rms_norm_static_quant",
    "all_reduce_add_rms_norm_static_quant_with_norm",
    "mla_query_absorb",
    "mla_query_absorb_static_quant",
    "mla_query_concat",
    "mla_query_concat_static_quant",
    "mla_query_rope",
    "qk_norm_rope",
    *(f"mla_norm_rope_cache{form}" for form in ("", "_into", "_static_quant", "_per_token_quant", "_group_quant")),
}
"""Ops that no function of AITER's does."""


REFUSED = {
    "rms_norm_mxfp8_quant": "floats into a buffer of bytes",
    "add_rms_norm_mxfp8_quant": "floats into a buffer of bytes",
    "gated_rms_norm_per_token_quant": "has no such function",
    "all_reduce_add_rms_norm_per_token_quant_with_norm": "emit_bf16 came with v0.1.17-longctx",
}
"""What is refused altogether up to v0.1.17, with words of the reason: by hand, from the record of AITER's sources."""

NAMES = tuple(binding.name for binding in amd.BINDINGS)
SOME = ("v0.1.16.post6", "v0.1.17", "v0.1.17-longctx", "v0.1.19.post1", "v0.1.20.post1")
"""At least one release of every generation."""


def refused(binding: str, release: str) -> str | None:
    """Words of the reason why a release's function serves no call of this binding, or None."""
    return REFUSED.get(binding) if between(release, None, "v0.1.17") else None


def test_the_bindings_are_of_ops_and_of_every_op_that_aiter_has_something_for() -> None:
    assert RELEASES == KNOWN
    served = {binding.op for binding in amd.BINDINGS}
    assert served <= {*OPS, *CALLS}, "a binding that no op uses"
    assert {*OPS, *(op.name for op in MLA)} - served - {op.name for op in LINEARS} == NOTHING_FOR
    assert set(REFUSED) <= set(NAMES)


@pytest.mark.parametrize("release", RELEASES)
def test_a_release(release):
    with installed(shared_standin(release)):
        releases = amd.installed_releases()
        assert releases is not None
        assert release in releases
        for name in NAMES:
            words, found = refused(name, release), amd.bind(name)
            if words is not None:
                assert isinstance(found, Refused), name
                assert words in found.reason
            else:
                assert isinstance(found, Bound), found
                assert found.probed.recorded, found.convention
                check_numbers(found)


@pytest.mark.parametrize("release", SOME[1:])
def test_gemma_norms_and_column_major_all_reduce_scales(release):
    with installed(shared_standin(release)):
        for op in ("add_rms_norm", "rms_norm_group_quant", "add_rms_norm_per_token_quant"):
            check(amd.bound(op).call, op, weight_offset=1.0)
        if release != "v0.1.17":
            check(amd.bound("add_rms_norm_mxfp8_quant").call, "add_rms_norm_mxfp8_quant", weight_offset=1.0)
        for form in ("", "_pad", "_per_token_quant"):
            op = f"all_reduce_add_rms_norm{form}"
            check_all_reduce(amd.bound(op).call, op, weight_offset=1.0)
        if release in ("v0.1.17", "v0.1.20.post1"):
            for form in ("group_quant", "group_quant_with_norm"):
                op = f"all_reduce_add_rms_norm_{form}"
                check_all_reduce(amd.bound(op).call, op, column_major=True)


@pytest.mark.parametrize("release", SOME)
def test_gemma_norms_of_the_latents(release):
    with installed(shared_standin(release)):
        for each in ("group", "per_token"):
            for op in (f"rms_norm_{each}_quant", f"add_rms_norm_{each}_quant_with_norm"):
                check(amd.bound(f"{op}.latents").call, op, weight_offset=1.0)
            op = f"mla_dual_rms_norm_{each}_quant_with_norm"
            check(amd.bound(op).call, op, q_weight_offset=1.0, kv_weight_offset=1.0)


@pytest.mark.parametrize("release", SOME)
def test_what_only_some_bindings_of_an_op_take(release):
    with installed(shared_standin(release)):
        gated = "gated_rms_norm_group_quant"
        check(amd.bound(gated).call, gated, column_major=True)
        for activation in ("silu", "sigmoid"):
            for before in (False, True):
                options = {"activation": activation, "norm_before_gate": before, "group_size": 64}
                check(amd.bound(f"{gated}.triton").call, gated, **options)
                check(amd.bound(f"{gated}.triton").call, gated, **options, use_ue8m0=True)
        silu, token = "silu_mul_group_quant", "silu_mul_per_token_quant"
        check(amd.bound(silu).call, silu, group_size=64, limit=0.75, column_major=True)
        check(amd.bound(f"{silu}.triton").call, silu, group_size=64)
        check(amd.bound(f"{silu}.clamp").call, silu, limit=0.7, column_major=True)
        check(amd.bound(f"{silu}.clamp").call, silu, group_size=32, limit=0.7)
        check(amd.bound(f"{token}.clamp").call, token, width=WIDTH, limit=0.7)


@pytest.mark.parametrize("release", ["v0.1.16.post3", "v0.1.18", "v0.1.20.post1"])
def test_decoding_several_queries_with_folded_heads(release):
    with installed(shared_standin(release, arch="gfx942")):
        mla_decode_of_several_queries(amd.bound("mla_decode").call)


def test_probing_imports_nothing_and_binding_imports_once():
    with installed(shared_standin("v0.1.20")):
        amd.probe_all()
        assert "aiter" not in sys.modules
        first = amd.bind("add_rms_norm")
        assert "aiter.ops.rmsnorm" in sys.modules
        assert amd.bind("add_rms_norm") is first


def test_many_threads_bind_one_binding():
    with installed(shared_standin("v0.1.20")):
        found: list[object] = []
        threads = [threading.Thread(target=lambda: found.append(amd.bind("mla_decode"))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 8
        assert len(set(map(id, found))) == 1


def test_a_binding_of_no_such_name():
    with pytest.raises(BackendError, match="no AITER binding is called 'add_rmsnorm'; did you mean 'add_rms_norm'"):
        amd.bind("add_rmsnorm")


def test_a_call_that_aiter_would_misread_is_seen_by_the_stand_in():
    """The numbers would mean little if the stand-in took everything."""
    with installed(shared_standin("v0.1.16.post3")):
        bound = amd.bound("add_rms_norm")
        module = sys.modules["aiter.ops.rmsnorm"]
        import torch

        x = torch.zeros(2, 3, 256, dtype=torch.bfloat16)
        with pytest.raises(StandInMisuse):
            module.rmsnorm2d_fwd_with_add(x, x, x, x, torch.ones(256, dtype=torch.bfloat16), 1e-5)
        assert bound.call(x, x, torch.ones(256, dtype=torch.bfloat16), 1e-5, 0.0)[0].shape == (2, 3, 256)


def test_the_tables_of_the_docs_say_what_is_expected():
    page = (Path(__file__).resolve().parents[2] / "docs" / "aiter.md").read_text()
    called, _, refusals = page.partition("### What is called")[2].partition("### What is refused")
    rows = re.findall(r"^\| `[^|]+` \| ([^|]+) \| (`[^|]+`) \|$", called, re.MULTILINE)
    since = {name: span_of(span) for span, names in rows for name in re.findall(r"`([\w.]+)`", names)}
    assert set(since) == set(NAMES)
    never = re.findall(r"^\| (`[^|]+`) \| [^|]+ \| every call: ([^|]+) \|$", refusals, re.MULTILINE)
    said = {name: reason for names, reason in never for name in re.findall(r"`([\w.]+)`", names)}
    for name in NAMES:
        words = REFUSED.get(name, "")
        absent = words == "has no such function"
        assert list(since[name]) == [each for each in RELEASES if not (absent and refused(name, each))]
        assert (name in said) == bool(words and not absent)
        assert absent or words in said.get(name, "")


def span_of(text: str) -> tuple[str, ...]:
    """The releases of `v0.1.18 to v0.1.19`, `up to v0.1.19`, `v0.1.18 or later`, `v0.1.18` and `every release`."""
    first, last = RELEASES[0], RELEASES[-1]
    if text.startswith("up to "):
        last = text.removeprefix("up to ")
    elif text.endswith(" or later"):
        first = text.removesuffix(" or later")
    elif text != "every release":
        first, _, to = text.partition(" to ")
        last = to or first
    return RELEASES[RELEASES.index(first) : RELEASES.index(last) + 1]


HOT = (
    *(
        "all_reduce",
        "gated",
        "mla",
        "norm_quant",
        "norms",
        "silu_mul",
    ),
    "tensors",
)


@pytest.mark.parametrize("module", HOT)
def test_the_hot_path_asks_nothing(module):
    """No import, no look by name, no `try`, no `inspect` in anything that a bound call runs."""
    file = Path(amd.__file__).with_name(f"{module}.py")
    functions = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)]
    assert functions
    for function in functions:
        for node in ast.walk(function):
            assert not isinstance(node, ast.Import | ast.ImportFrom | ast.Try), (module, node.lineno)
            if isinstance(node, ast.Name):
                assert node.id not in ("getattr", "hasattr", "inspect", "importlib"), (module, node.lineno)
