"""bench/scripts/few_token_gemm.py without a GPU: its kernel in Triton's interpreter, and compiled for the GPU that it was written for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

SCRIPTS = Path(__file__).parents[2] / "bench" / "scripts"


@pytest.fixture
def harness(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import few_token_gemm

    return few_token_gemm


def exact(tokens, depth):
    """Random bfloat16 that e4m3 holds as it is: Triton's interpreter does not round to e4m3 as a GPU does."""
    values = (torch.randn(tokens, depth // 128, 128) * 112).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    values[..., 0] = 448
    return (values * 0.5 ** torch.randint(9, (*values.shape[:2], 1))).flatten(1).bfloat16()


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted")
@pytest.mark.parametrize("name", ["ours", "ours, bfloat16 in"])
@pytest.mark.parametrize(
    ("columns", "depth", "tokens", "width", "split"),
    [(192, 384, 1, 64, 1), (320, 640, 5, 128, 3), (64, 256, 16, 64, 2)],
    ids=["one part", "cut off", "whole tile"],
)
def test_the_kernel_agrees_with_float64(harness, columns, depth, tokens, width, split, name):
    torch.manual_seed(tokens)
    tiling = harness.Tiling(width, split, 3, "plain")
    weights = [harness.drawn(columns, depth, "cpu") for _ in range(2)]
    x = exact(tokens, depth)
    calls = harness.our_calls(name, tiling, tokens, x, weights)
    right = harness.right_results(*harness.quantised(x), weights).repeat(2, 1, 1)
    # The interpreter truncates where a GPU rounds to bfloat16.
    assert harness.relative_error(torch.stack([call() for call in (*calls, *calls)]), right) < 0.005


def test_tilings_share_the_depth_of_every_shape(harness):
    for columns, depth in harness.SHAPES:
        several = harness.tilings(columns, depth)
        assert len(several) == 12
        assert {tiling.way for tiling in several} == set(harness.WAYS)
        assert all(1 <= tiling.split <= depth // 128 and 128 % tiling.columns == 0 for tiling in several)


def test_the_kernel_compiles_to_what_it_was_written_for():
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("compile_few_token_gemm.py")],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert [each["way"] for each in found] == ["plain", "early", "ahead", "boxes", "boxes"]
    for each in found:
        # Tokens are the narrow side of the tensor cores' products.
        assert each["products"] == [f"wgmma.mma_async.sync.aligned.m64n{each['tokens']}k32.f32.e4m3.e4m3"], each
        assert each["shared"] <= 227 << 10, each
        assert each["waits"] == each["early"] == (each["way"] != "plain"), each
        # Weights are fetched, and one of their scales is read, before the kernel in front has ended: nothing that it writes.
        assert bool(each["fetches"]) == (each["way"] in ("ahead", "boxes")), each
        assert each["reads"] == each["waits"], each
        assert bool(each["boxes"]) == (each["way"] == "boxes"), each
