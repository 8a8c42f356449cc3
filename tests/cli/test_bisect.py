"""What moves a model's numbers is found: one fusion of another package, two that only together do, or nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import backend_at_hand, outside_package, run_copy

from layerfuse import bisecting, registry
from layerfuse.bisecting import smallest
from layerfuse.fusion import FusionConfig, FusionConfigError, Target, plan
from layerfuse.testing import small_model

RUN = """
import sys, torch
torch.set_num_threads(1)
import torch._inductor.compile_fx as inductor
inductor.compile_fx_inner = lambda gm, _inputs, **_: gm
from layerfuse.cli import main
main({!r})
"""


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package whose kernel gives 1.01 times what it should."""
    return outside_package(tmp_path_factory.mktemp("outside"), 1.01)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("[1, 2, 3, 4, 5]\n\n[7, 8, 9, 10, 11]\n")
    return file


def bisected(outside: Path, *arguments: object, fusions: str) -> Any:
    code = RUN.format(["bisect", *map(str, arguments)])
    return run_copy(code, outside, LAYERFUSE_FUSIONS=fusions, CUDA_VISIBLE_DEVICES="")


def test_a_wrong_kernel_is_named_with_its_site(outside, prompts):
    answer = bisected(outside, "deepseek-v3", prompts, fusions="outside_add_rms_norm,mla_dual_rms_norm")
    assert answer.returncode == 1, answer.stdout + answer.stderr
    lines = answer.stdout.splitlines()
    assert "outside_add_rms_norm at 4 sites" in lines[0] and "mla_dual_rms_norm at 2 sites" in lines[0]
    assert any(line.startswith("outside_add_rms_norm at 2 sites: off by ") for line in lines)
    end = lines.index("found:")
    assert lines[end + 1].startswith("  outside_add_rms_norm at model")
    assert lines[end + 2].startswith("  off by ") and lines[end + 2].endswith("too far")
    assert lines[end + 3].startswith("without it: off by ") and lines[end + 3].endswith("too far")


def test_nothing_moves_where_fusions_are_right_and_the_model_comes_from_a_folder(outside, prompts, tmp_path):
    model = small_model(registry.model("deepseek-v3"), layers=1, hidden_size=64, heads=2)
    model.save_pretrained(tmp_path / "model")
    answer = bisected(outside, tmp_path / "model", prompts, fusions="-outside_add_rms_norm")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "near enough" in answer.stdout and answer.stdout.endswith("no fusion moves a number\n")
    wrong = bisected(outside, tmp_path / "model", prompts, "--greedy", fusions="outside_add_rms_norm")
    assert wrong.returncode == 0, wrong.stdout + wrong.stderr


def test_what_is_wrong_with_the_arguments_is_said(run, prompts, tmp_path):
    assert run("bisect", "no-such-model", prompts).code == 2
    bad = tmp_path / "bad.jsonl"
    for text, says in (
        ("[1, 2]\n[1, x]\n", "line 2: expected token ids"),
        ("[true]\n", "line 1"),
        ("\n", "there is none"),
    ):
        bad.write_text(text)
        answer = run("bisect", "deepseek-v3", bad)
        assert answer.code == 2 and says in answer.err
    bad.write_text("[1, 100000]\n")
    assert "token 100000 is beyond the " in run("bisect", "deepseek-v3", bad).err
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v3"}))
    answer = run("bisect", tmp_path, prompts)
    assert answer.code == 1 and "transformers does not load it" in answer.err


@pytest.mark.parametrize(
    ("units", "culprits"),
    [
        (range(1), [{0}]),
        (range(9), [{7}]),
        (range(9), [{0, 8}]),
        (range(9), [{2, 3, 7}]),
        (range(8), [{1, 5}, {6}]),
        (range(5), [{0, 1, 2, 3, 4}]),
    ],
    ids=str,
)
def test_a_smallest_set_is_found(units: range, culprits: list[set[int]]) -> None:
    def moves(some: Any) -> bool:
        return any(each <= set(some) for each in culprits)

    found = smallest(units, moves)
    assert moves(found)
    assert not any(moves([one for one in found if one != other]) for other in found)


@pytest.mark.usefixtures("op_by_op")
def test_two_that_move_a_number_only_together(monkeypatch):
    """A kernel that is wrong where it ran before in the same call."""
    from layerfuse.fusion import backends
    from layerfuse.fusion.ops.library import declared

    model = small_model(registry.model("deepseek-v3"), layers=1, hidden_size=64, heads=2)
    seen: list[int] = []
    final = model.model.norm.weight.data_ptr()

    def kernel(x: Any, residual: Any, weight: Any, *settings: Any) -> Any:
        normed, total = declared("add_rms_norm").reference(x, residual, weight, *settings)
        seen.append(weight.data_ptr())
        wrong = seen[-1] == final and len(seen) == 2
        return (normed * 1.5 if wrong else normed), total

    kept = backends._backends["add_rms_norm"]
    monkeypatch.setitem(backends._backends, "add_rms_norm", [backend_at_hand("add_rms_norm", kernel), *kept])
    backends.decide_again()
    try:
        found = bisecting.bisect(model, [[1, 2, 3]], step=lambda _: seen.clear())
    finally:
        monkeypatch.undo()
        backends.decide_again()
    assert found is not None
    assert set(found.pairs) == {
        ("model.layers.0:post_attention", "add_rms_norm"),
        ("model:final", "add_rms_norm"),
    }
    assert not found.others.beyond and found.moved.beyond


def test_a_config_holds_pairs_only() -> None:
    entry = registry.model("deepseek-v3")
    sites = [site for site, _ in entry.specs()][:1]
    assert sites
    whole = plan(entry.specs(), Target.named("cpu"))
    first = whole.expected()[0]
    some = plan(entry.specs(), Target.named("cpu"), FusionConfig(only=[(first.site, first.fusion)]))
    assert [(each.site, each.fusion) for each in some.expected()] == [(first.site, first.fusion)]
    assert any("leaves on at this site" in each.reason for each in some.refused(first.fusion))
    for wrong in ("add_rms_norm", [("site", "no_such_fusion")], [("site", 3)]):
        with pytest.raises(FusionConfigError, match=r"FusionConfig\.only: "):
            FusionConfig(only=wrong)
