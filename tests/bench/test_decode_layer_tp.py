"""benchmarks/decode_layer_tp.py as it is typed, on two processes with tiny layers: it cannot be tried before a GPU is paid for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("torch")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "decode_layer_tp.py"


def run(*arguments):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments, "--device", "cpu", "--tokens", "2"],
        capture_output=True, text=True, check=False, timeout=300, env=environment,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("model", "fused"),
    [
        pytest.param("gpt-oss-120b", "all_reduce_add_rms_norm x2", marks=pytest.mark.thorough),
        (
            "deepseek-v3",
            "all_reduce_add_rms_norm_group_quant x2, mla_dual_rms_norm_group_quant x1, silu_mul_group_quant x1",
        ),
    ],
)
def test_ranks_start_fuse_and_agree(model, fused):
    done = run(model, "--arms", "opaque,all")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert any(line.startswith(f"  all fusions, plain: {fused} (") for line in lines), done.stdout
    assert any(line.startswith(f"{model}, 2 tokens: all fusions: ") for line in lines), done.stdout


def test_what_was_not_begun_in_time_is_a_failure():
    done = run("--limit", "-1")
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        f"FAILED: {model}, 2 tokens: not begun: -1 s were over" for model in ("deepseek-v3", "gpt-oss-120b")
    ]


def test_models_are_those_of_the_help():
    assert "of deepseek-v3, gpt-oss-120b; default: all" in " ".join(run("--help").stdout.split())
    refused = run("gpt-oss-20b")
    assert refused.returncode == 2
    assert "gpt-oss-20b: expected some of deepseek-v3, gpt-oss-120b" in refused.stderr
