"""AITER's Triton ops from a checkout: what stands in off ROCm, held to a small package that imports as AITER does."""

import subprocess
from pathlib import Path

import pytest
from helpers import files_in, run_copy

from layerfuse.bench import aiter_checkout


@pytest.fixture
def checkout(tmp_path):
    for name, _, text in files_in((Path(__file__).parent / "aiter_checkout.txt").read_text(encoding="utf-8")):
        file = tmp_path / "a checkout" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path / "a checkout"


@pytest.mark.parametrize(("fp8", "arch"), [("float8_e4m3fn", "gfx950"), ("float8_e4m3fnuz", "gfx942")])
def test_off_rocm_two_modules_are_stood_in_for_and_nothing_else(checkout, fp8, arch):
    done = run_copy(
        "import os, sys, torch\n"
        "from pathlib import Path\n"
        "from layerfuse.bench import aiter_checkout\n"
        "before = list(sys.path)\n"
        f"load = lambda path: aiter_checkout.load(Path({str(checkout)!r}), torch.{fp8}, path)\n"
        "found = load('normalization.rmsnorm:rms_norm')\n"
        "print(found, load('quant.fused_fp8_quant:fused_rms_fp8_group_quant'))\n"
        "print(sys.path == before, os.environ.get('AITER_TRITON_ONLY'))\n"
        "print(load('normalization.rmsnorm:rms_norm') is found)"
    )
    assert done.stdout.splitlines() == [f"('rms_norm', '{arch}', False) torch.{fp8}", "True None", "True"], done.stderr


def test_what_is_no_checkout_is_said_so(tmp_path, checkout):
    assert aiter_checkout.why_not(checkout) is None
    assert aiter_checkout.why_not(checkout / "aiter") == (
        "aiter holds no aiter/ops/triton: give the root of a checkout of ROCm/aiter"
    )


def test_the_version_is_the_commit_of_the_checkout_and_not_of_what_it_lies_in(checkout):
    def git(*arguments):
        return subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *arguments],
            cwd=checkout, check=True, capture_output=True, text=True,
        ).stdout.strip()  # fmt: skip

    assert aiter_checkout.version(checkout) is None
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "all")
    assert aiter_checkout.version(checkout) == f"commit {git('rev-parse', '--short=12', 'HEAD')}"
    assert aiter_checkout.version(checkout / "aiter") is None
