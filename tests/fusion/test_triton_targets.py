"""The kernel compiles to machine code for every target, AMD's without an AMD GPU, and to the accesses it was written for."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture(scope="module")
def kernels() -> list[dict[str, Any]]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result: list[dict[str, Any]] = json.loads(done.stdout)
    return result


def test_every_variant_becomes_machine_code(kernels: list[dict[str, Any]]) -> None:
    assert {kernel["target"] for kernel in kernels} == {"gfx942", "gfx950", "sm90"}
    assert all(kernel["binary"] > 1000 and kernel["spills"] == 0 for kernel in kernels)


def test_launches_overlap_on_nvidia_only(kernels: list[dict[str, Any]]) -> None:
    for kernel in kernels:
        assert kernel["overlap"] == kernel["early"]
        assert not (kernel["early"] and kernel["target"].startswith("gfx"))


def test_many_rows_are_read_sixteen_bytes_at_a_time(kernels: list[dict[str, Any]]) -> None:
    wide = {
        (k["target"], k["form"]) for k in kernels if k["wide_loads"] and k["step"] == (1 if k["form"] == "plain" else 3)
    }
    assert wide == {
        (target, form) for target in ("gfx942", "gfx950", "sm90") for form in ("plain", "per token", "group")
    }
