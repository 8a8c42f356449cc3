"""`layerfuse plan` with what attention allocates, and the matrix of models against tensor-parallel sizes."""

from __future__ import annotations

import json
from xml.etree import ElementTree

from helpers import ROOT

KIMI = (ROOT / "tests" / "data" / "plan_kimi_k25_attention.txt").read_text(encoding="utf-8")


def attention_of(run, *arguments):
    answer = run("plan", *arguments)
    assert answer.code == 0, answer.err
    return answer.out[answer.out.index("\nattention: ") + 1 :]


def test_the_whole_answer_for_kimi_k25(run):
    asked = ("--batch", 256, "--context", 131072, "--kv", "fp8", "--aiter", "v0.1.17")
    assert attention_of(run, "kimi-k2.5", "--tp", 8, "--target", "gfx950", *asked) == KIMI


def test_json_holds_the_same(run):
    data = json.loads(run("plan", "kimi-k2.5", "--tp", 8, "--batch", 256, "--context", 1000, "--json").out)["attention"]
    (group,) = data["groups"]
    assert group["metadata"]["heads"]["kernel_heads"] == 16
    assert data["bytes"]["cache"] == 576 * 2 * 61 * 1000 * 256
    assert data["bytes"]["metadata"] == sum(buffer["bytes"] for buffer in group["metadata"]["buffers"])
    assert "attention" not in json.loads(run("plan", "kimi-k2.5", "--json").out)


def test_the_matrix_as_a_picture(run, tmp_path):
    file = tmp_path / "heads.svg"
    assert run("plan", "--all-tp", "--kv", "fp8", "--svg", file).out == f"wrote {file}\n"
    text = "".join(ElementTree.parse(file).getroot().itertext())
    assert "kimi-k2.5" in text
    assert "longcat-flash" in text
