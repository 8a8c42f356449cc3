"""The kernels compile to machine code for every target, without such a GPU, and to the accesses they were written for."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from layerfuse.fusion.linear_ops import MOST

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

TARGETS = {"gfx942", "gfx950", "sm90", "sm100"}


def compiled(script: str, *arguments: str) -> list[dict[str, Any]]:
    """What a script prints in a process that does not interpret kernels."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name(script), *arguments],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: list[dict[str, Any]] = json.loads(done.stdout)
    return result


@pytest.fixture(scope="module", params=["in turn", pytest.param("all", marks=pytest.mark.thorough)])
def kernels(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Every op in both regimes, each on a target in turn, and all of them on all targets."""
    return compiled("compile_kernels.py", request.param)


@pytest.mark.parametrize("cases", ["in turn", pytest.param("all", marks=pytest.mark.thorough)])
def test_the_kernels_of_a_decode_layer_become_machine_code(cases: str) -> None:
    """In every form of the cache and with all pairs; none keeps in memory what belongs into registers."""
    built = compiled("compile_latent_kernels.py", cases)
    assert {each["target"] for each in built} == TARGETS
    assert {(each["form"], each["kernel"]) for each in built} >= {
        (form, "norm_rope_cache") for form in ("plain", "fp8", "fp8_ds_mla")
    }
    assert {each["pairs"] for each in built} == {"interleaved", "halves", "interleaved_to_halves", "none"}
    assert all(
        each["binary"] > 1000 and each["spills"] == 0 and bool(each["overlap"]) == each["early"] for each in built
    )
    # What a program may have on every GPU of the kind: 99 KiB on NVIDIA's small ones.
    most = {"sm90": 99 << 10, "sm100": 99 << 10, "gfx942": 64 << 10, "gfx950": 160 << 10}
    assert all(each["shared"] <= most[each["target"]] for each in built)
    # The latent of a query, 512 columns of a head, is read sixteen bytes at a time.
    assert all(each["wide_loads"] for each in built if each["op"].startswith("mla_query_concat"))


def test_linears_become_machine_code_that_fits_everywhere() -> None:
    built = compiled("compile_linear_kernels.py")
    variants = {(each["target"], each["tokens"], each["form"]) for each in built}
    targets = TARGETS | {"sm89"}  # the smallest shared memory that fp8 is multiplied with
    few = [(target, 8) for target in targets if target.startswith("sm")]
    forms = ("quantises", "quantised", "channels", "plain")
    both = ("few_token_experts_up", "few_token_experts_down")
    assert variants == {(*each, form) for each in (*few, *((target, 16) for target in targets)) for form in forms} | {
        (target, tokens, form)
        for target in targets
        for tokens in (8 if target in ("gfx950", "sm90") else 1, 16)
        for form in both
    }
    assert all(
        each["binary"] > 1000 and each["spills"] == 0 and bool(each["overlap"]) == each["early"] for each in built
    )
    # Two programs on an SM of Hopper's, or one where no SM has two of them; one elsewhere.
    most = {"sm89": 99, "sm90": 113, "sm100": 113, "gfx942": 64, "gfx950": 64}
    few = {id(each) for each in built if each["target"] == "sm90" and each["programs"] <= 132}
    assert all(each["shared"] <= (227 if id(each) in few else most[each["target"]]) << 10 for each in built)
    assert any(each["shared"] > 113 << 10 for each in built if id(each) in few)
    assert all(each["wide_loads"] for each in built)


def test_every_variant_becomes_machine_code(kernels: list[dict[str, Any]]) -> None:
    for kernel in ("dual_norm", "row_norm", "gated_norm", "silu_mul"):
        assert {built["target"] for built in kernels if built["kernel"] == kernel} - {"sm75"} == TARGETS
    assert len({built["op"] for built in kernels}) > 30
    assert all(kernel["binary"] > 1000 and kernel["spills"] == 0 for kernel in kernels)


def test_launches_overlap_on_nvidia_only(kernels: list[dict[str, Any]]) -> None:
    for kernel in kernels:
        # With few tokens the next kernel starts before this one waits, else behind that (`rows.wait_in_turn`); all-reduces wait first.
        first = [] if kernel["kernel"].startswith("all_reduce") else ["launch_dependents"]
        assert kernel["overlap"] == [*first, "wait", "launch_dependents"] * kernel["early"]
        if kernel["early"] and first:
            assert kernel["few"][-1] == (MOST + 1) * kernel["per_token"] - 1, kernel["op"]
        assert not (kernel["early"] and kernel["target"].startswith("gfx"))


def test_many_rows_are_read_sixteen_bytes_at_a_time(kernels: list[dict[str, Any]]) -> None:
    wide = {(k["target"], k["op"]) for k in kernels if k["wide_loads"] and k["widths"] == [1536, 512]}
    forms = ("mla_dual_rms_norm_per_token_quant", "mla_dual_rms_norm_group_quant")
    assert wide >= {(target, form) for target in TARGETS for form in forms}


def test_no_row_on_the_grid_is_read_element_by_element(kernels: list[dict[str, Any]]) -> None:
    """Not even where a row is 1448 elements long, which 16 does not divide, but 8 does."""
    assert {tuple(k["widths"]) for k in kernels if k["loads_one_by_one"]} == {(1001, 333)}


def test_nvidia_rounds_in_pairs(kernels: list[dict[str, Any]]) -> None:
    """What is rounded before it is quantised, but for the largest magnitude of a row, which is one value."""
    quantised = [
        k for k in kernels if k["target"] in ("sm90", "sm100") and k["op"].partition("_with_")[0].endswith("_quant")
    ]
    assert {k["kernel"] for k in quantised} >= {"dual_norm", "row_norm", "gated_norm", "silu_mul"}
    assert all(k["in_pairs"] and k["rounded_singly"] <= 1 for k in quantised)
    assert {k["in_pairs"] for k in kernels if k["target"] in ("sm75", "gfx942", "gfx950")} == {False}
    assert any(k["target"] == "sm75" for k in kernels)


def test_launches_of_256_rows_overlap(kernels: list[dict[str, Any]]) -> None:
    """An SM has room for two programs of a launch and two of the next one, which would else wait for its end."""
    built = [k for k in kernels if k["step"] == 1 and k["op"].startswith("add_rms_norm")]
    assert len({k["op"] for k in built}) > 10
    room = {k["op"]: 65536 // (-(-k["registers"] // 8) * 8 * 32 * k["warps"]) for k in built}
    assert min(room.values()) >= 4, room
    # Two registers in memory at most, as in NVFP4 with Triton 3.9.
    assert all(k["stack"] <= 8 for k in built)


def test_groups_are_read_before_anything_is_summed(kernels: list[dict[str, Any]]) -> None:
    """The weights too: behind the sum each row would wait for memory twice."""
    late = {k["op"]: k["late_loads"] for k in kernels if k["step"] == 1 and k["op"].endswith("rms_norm_group_quant")}
    assert late == {"add_rms_norm_group_quant": 0, "rms_norm_group_quant": 0}


def test_narrow_rows_share_a_program(kernels: list[dict[str, Any]]) -> None:
    narrow = {
        (k["target"], k["rows"])
        for k in kernels
        if k["op"] == "add_rms_norm" and k["widths"] == [128] and not k["early"]
    }
    assert narrow == {(target, 8) for target in TARGETS}


def test_all_reduces_push_everything_before_they_wait(kernels: list[dict[str, Any]]) -> None:
    """A row goes to three peers, sixteen bytes at a time, before the first look at theirs; a look goes to memory itself."""
    built = [kernel for kernel in kernels if kernel["kernel"] == "all_reduce_row_norm"]
    assert {kernel["target"] for kernel in built} == {"sm90", "sm100"}
    assert len({kernel["op"] for kernel in built}) == 8
    # Once before the loop and once inside.
    assert all((kernel["pushes"], kernel["looks"]) == (3, 6) for kernel in built)
