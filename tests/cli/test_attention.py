"""`layerfuse plan` with what attention allocates, and the matrix of models against tensor-parallel sizes."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

KIMI = """\
attention: batch 256, 1 query per sequence, fp8 queries and cache

MLA, 8 heads: 61 layers
  heads                    8 -> 16, repeated twice (8 heads are padded to 16, the fewest that every kernel takes)
  sizes                    for AITER v0.1.17, 256 compute units
  work_metadata_ptrs       2 uint64, 16 B
  work_indptr              257 int32, 1.0 KiB
  work_info_set            511 x 8 int32, 16.0 KiB
  reduce_indptr            257 int32, 1.0 KiB
  reduce_final_map         256 x 2 int32, 2.0 KiB
  reduce_partial_map       510 int32, 2.0 KiB
  scratch, partial_output  510 x 1 x 16 x 512 fp32, 15.9 MiB, allocated in every decode
  scratch, partial_lse     510 x 1 x 16 x 1 fp32, 31.9 KiB, allocated in every decode

memory on this rank
  mla cache  576 B per token and layer, 34.3 KiB per token, 4.3 GiB per sequence of 131072
  metadata   22.0 KiB, and 16.0 MiB of scratch at a time
  in all     1098.0 GiB, of which 1098.0 GiB are cache of 256 sequences
"""


def attention_of(run, *arguments):
    answer = run("plan", *arguments)
    assert answer.code == 0, answer.err
    return answer.out[answer.out.index("\nattention: ") + 1 :]


def test_the_whole_answer_for_kimi_k25(run):
    asked = ("--batch", 256, "--context", 131072, "--kv", "fp8", "--aiter", "v0.1.17")
    assert attention_of(run, "kimi-k2.5", "--tp", 8, "--target", "gfx950", *asked) == KIMI


def test_without_the_options_nothing_is_said_of_attention(run):
    assert "\nattention:" not in run("plan", "kimi-k2.5", "--tp", 8).out


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (("--batch", 64, "--aiter", "0.1.18"), "AITER v0.1.17-longctx or later: the decode ignores its plan"),
        (("--batch", 512, "--aiter", "v0.1.16.post3"), "AITER up to v0.1.16.post6: max_split_per_batch"),
        (("--queries", 2, "--aiter", "v0.1.18", "--target", "gfx942", "--tp", 2), "points its output at new storage"),
        (("--batch", 8, "--target", "sm90"), "gfx942 and gfx950, and the target is sm90"),
    ],
)
def test_what_a_release_does_wrong_is_a_warning_and_what_it_cannot_do_a_refusal(run, asked, words):
    assert words in attention_of(run, "kimi-k2.5", *(() if "--tp" in asked else ("--tp", 8)), *asked)


def test_the_matrix_of_one_model_as_json_says_why_a_cell_is_refused(run):
    asked = ("--queries", 5, "--aiter", "v0.1.18", "--target", "gfx942")
    data = json.loads(run("plan", "kimi-k2.5", "--all-tp", *asked, "--json").out)
    (row,) = data["models"]
    cells = {cell["tp"]: cell for cell in row["cells"]}
    assert "at most 4 queries" in cells[4]["refused"]


def test_delta_nets_have_state_and_windows_end(run):
    linear = attention_of(run, "kimi-linear-48b-a3b", "--tp", 8, "--batch", 4)
    assert "conv state       1536 x 3 bf16, 9.0 KiB" in linear
    assert "state      5.2 MiB per sequence, 20.7 MiB in all" in linear
    oss = attention_of(run, "gpt-oss-20b", "--tp", 4, "--context", 131072)
    assert "6.0 KiB per token of the last 128, 768.0 KiB per sequence of 131072" in oss


def test_what_is_not_counted_is_said(run):
    said = attention_of(run, "bamba-9b", "--batch", 4, "--context", 1024)
    assert "are cache of 4 sequences; the state of 29 mixers is not counted" in said


def test_json_holds_the_same(run):
    data = json.loads(run("plan", "kimi-k2.5", "--tp", 8, "--batch", 256, "--context", 1000, "--json").out)["attention"]
    (group,) = data["groups"]
    assert group["metadata"]["heads"]["kernel_heads"] == 16
    assert data["bytes"]["cache"] == 576 * 2 * 61 * 1000 * 256
    assert data["bytes"]["metadata"] == sum(buffer["bytes"] for buffer in group["metadata"]["buffers"])
    assert "attention" not in json.loads(run("plan", "kimi-k2.5", "--json").out)


def test_an_unknown_release_is_a_wrong_question(run):
    answer = run("plan", "kimi-k2.5", "--aiter", "v0.1.99")
    assert answer.code == 2
    assert "nothing is recorded of a release 'v0.1.99' of AITER" in answer.err
    old = run("plan", "kimi-k2.5", "--aiter", "v0.1.8").err
    assert "Known: v0.1.16.post3, the oldest that a supported engine pins, to v0.1.20.post1" in " ".join(old.split())


def test_the_matrix(run):
    lines = run("plan", "--all-tp", "--aiter", "v0.1.17").out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("tokens up to"))
    of_heads = [*lines[:start], *(line for line in lines[start:] if line.startswith("["))]
    rows = {
        line.split()[0]: " ".join(line.split()[1:]) for line in of_heads if line and not line.startswith("heads of")
    }
    assert rows["kimi-k2.5"] == "64 32 16 8→16 50% 4→16 75% 2→16 88%"
    assert rows["kimi-k3"].startswith("96 48 24→32 25% 12→16 25%")
    assert rows["glm-4.7-flash"].endswith("5→16 69% [2] [3] [4]")
    assert rows["[2]"] == "20 heads cannot be shared equally by 8 ranks"
    assert not any(name.startswith(("gpt-oss", "qwen")) for name in rows)


def test_the_matrix_as_a_picture(run, tmp_path):
    file = tmp_path / "heads.svg"
    assert run("plan", "--all-tp", "--kv", "fp8", "--svg", file).out == f"wrote {file}\n"
    text = "".join(ElementTree.parse(file).getroot().itertext())
    assert "kimi-k2.5" in text
    assert "longcat-flash" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "give a model, or --all-tp"),
        (("--all-tp", "--batch", 4), "shows every size"),
        (("--all-tp", "--tp", 8), "shows every size"),
        (("--all-tp", "--target", "gfx95"), "no target is called"),
        (("kimi-k2.5", "--kv", "fp4"), "fp4"),
        (("kimi-k2.5", "--batch", 0), "0"),
    ],
)
def test_wrong_questions(run, arguments, words):
    answer = run("plan", *arguments)
    assert answer.code == 2
    assert words in answer.err


def test_no_torch_is_imported(run_python):
    code = (
        "import sys\n"
        "from layerfuse.cli import main\n"
        "try: main(['plan', 'kimi-k2.5', '--tp', '8', '--batch', '256'])\n"
        "except SystemExit: pass\n"
        "print('torch' in sys.modules)"
    )
    assert run_python("-c", code).out.splitlines()[-1] == "False"


def test_the_matrix_of_a_model_without_mla_layers_has_its_all_reduces(run):
    out = run("plan", "gpt-oss-20b", "--all-tp", "--target", "gfx950", "--aiter", "v0.1.20").out
    assert "heads of" not in out
    row = next(line for line in out.splitlines() if line.startswith("gpt-oss-20b"))
    assert " ".join(row.split()[1:]) == "[1] 159 / 11650 79 / 11650 39 / 11650 [2] [3]"
    assert "[2] AITER v0.1.20: the kernels take 2, 4 and 8 ranks, not 16" in out
    before = json.loads(run("plan", "gpt-oss-20b", "--all-tp", "--aiter", "v0.1.18", "--json").out)["all_reduce"][0]
    assert [cell["stages"] for cell in before["cells"]] == [[], [11650], [11650], [11650], [], []]
