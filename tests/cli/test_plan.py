import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from helpers import ROOT

from layerfuse import registry
from layerfuse.cli import planning

KIMI_CONFIG = Path(__file__).parent.parent / "engines" / "checkpoints" / "kimi-k2.5" / "config.json"

KIMI, LAYERS = (
    (ROOT / "tests" / "data" / f"plan_kimi_k25{part}.txt").read_text(encoding="utf-8") for part in ("", "_layers")
)


def said(answer):
    """Words only: footnotes are wrapped."""
    return " ".join(answer.out.split())


def test_the_whole_answer_for_kimi_k25(run):
    answer = run("plan", "kimi-k2.5", "--tp", 8)
    assert answer.code == 0
    assert answer.out == KIMI
    assert answer.err == ""
    assert run("plan", "kimi-k2.5", "--tp", 8, "-v").out == KIMI + LAYERS


def test_what_one_gets_is_in_the_first_twelve_lines_and_each_reason_once(run):
    asked = ["deepseek-v3", "--tp", 8, "--target", "sm90", "--engine", "vllm", "--quant", "none"]
    head, notes = re.split(r"\n\n +\[1\] ", run("plan", *asked).out)
    assert len(head.splitlines()) <= 12
    assert notes.count("unless switched on. vLLM's compiler merges the add") == 1
    assert notes.count("do not quantise what they read, as was said") == 2, "of two sites"
    assert all(len(line) <= 100 for line in notes.splitlines())


def test_the_sites_of_a_row_are_those_of_the_json(run):
    """Ranges of tokens are of the same sites, so a site is counted once whatever the ranges are."""
    asked = ["plan", "kimi-k2.5", "--tp", 8, "--quant", "group128"]
    rows = re.findall(r"^(\w+) +(\d+)   (.*)$", run(*asked).out, re.MULTILINE)
    found = {name: int(sites) for name, sites, _ in rows}
    for name, sites, answers in rows:
        assert int(sites) == sum(map(int, re.findall(r"(\d+) \[", answers))), name
    wanted: dict[str, int] = {}
    for kind in json.loads(run(*asked, "--json").out)["kinds"]:
        for decisions in kind["sites"].values():
            for name in {d["fusion"] for d in decisions if d["decision"] != "not_applicable"}:
                of = [d for d in decisions if d["fusion"] == name]
                wanted[name] = wanted.get(name, 0) + sum(d["sites"] for d in of if not d["tokens"].startswith("from "))
    assert {name: found[name] for name in wanted} == wanted


def test_a_fusion_whose_answer_hangs_on_something_depends(run, silent_models):
    asked = ["--models", silent_models, "--target", "sm90", "--quant", "per_token"]
    out = run("plan", "silent-gpt-oss", *asked).out
    row = re.search(r"^add_rms_norm_per_token_quant +72 +35 \[(\d+)\] +1 \[\d+\] +36 \[(\d+)\]$", out, re.MULTILINE)
    assert row, out
    assert f"[{row[2]}] 36 sites: not known: the model's entry declares no MLP" in out


def imported(run_python, *arguments, before="") -> list[str]:
    """Of what a plan can do without, the modules that it has imported."""
    code = (
        f"import sys\n{before}\n"
        "from layerfuse.cli import main\n"
        f"try: main({['plan', *arguments]!r})\n"
        "except SystemExit: pass\n"
        "print(*[m for m in ('torch', 'transformers', 'vllm', 'numpy', 'pydantic', 'layerfuse.engines', 'importlib.metadata') if m in sys.modules])"
    )
    return run_python("-c", code).out.splitlines()[-1].split()


@pytest.mark.parametrize("more", [(), ("--batch", "256")])
def test_no_torch_and_no_engine_is_imported(run_python, more):
    assert imported(run_python, "kimi-k2.5", "--tp", "8", *more) == []


@pytest.mark.parametrize(
    ("name", "may"),
    [("nvme0", False), *((name, True) for name in ("nvidia0", "nvgpu", "nvmap", "nvhost-gpu", "kfd", "dxg"))],
)
def test_where_there_may_be_a_gpu_its_driver_has_a_file(monkeypatch, name, may):
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("os.listdir", lambda _: ["null", name])
    assert planning._may_have_gpu() is may
    monkeypatch.setattr("sys.platform", "win32")
    assert planning._may_have_gpu()


@pytest.mark.parametrize(("files", "asked"), [(["null", "nvme0"], []), (["null", "nvidia0"], ["torch"])])
def test_torch_is_asked_for_the_gpu_where_there_may_be_one(run_python, files, asked):
    before = f"import os; sys.platform, os.listdir = 'linux', lambda _: {files!r}"
    got = imported(run_python, "kimi-k2.5", "--engine", "vllm", before=before)
    assert [name for name in got if name == "torch"] == asked
    assert "vllm" not in got


def test_what_its_level_alone_leaves_off_is_said_with_the_variable_that_switches_it_on(run, monkeypatch):
    def notes(fusions):
        monkeypatch.setenv("LAYERFUSE_FUSIONS", fusions)
        data = json.loads(run("plan", "deepseek-v3", "--target", "gfx950", "--json").out)
        return [note for note in data["notes"] if note.startswith("LAYERFUSE_FUSIONS=")]

    (said,) = notes("")
    named = said.partition(" ")[0].removeprefix("LAYERFUSE_FUSIONS=")
    assert "+silu_mul_group_quant" in named and "LAYERFUSE_FUSIONS=all" in said
    assert notes(named) == notes("all") == notes("none") == []


def test_the_traceback_on_request(run_python):
    answer = run_python("-m", "layerfuse", "plan", "glm-4.7-flash", "--tp", "8", env={"LAYERFUSE_TRACEBACK": "1"})
    assert answer.code == 1
    assert "Traceback" in answer.err


def test_the_json_holds_what_its_help_promises(run):
    data = json.loads(run("plan", "kimi-linear-48b-a3b", "--tp", 4, "--rank", 3, "--json").out)
    assert set(data) == {
        *("model", "hf_id", "adapter", "tp", "rank", "engine"),
        *("target", "config", "published", "alike", "defaults", "num_hidden_layers", "notes", "kinds", "engine_does"),
    }
    kinds = ["residual", "kda", "dense", "shared_experts", "mla", "final", "experts"]
    assert [kind["kind"] for kind in data["kinds"]] == kinds
    for kind in data["kinds"]:
        assert set(kind) == {"kind", "family", "count", "layers", "spec", "sites"}
        assert kind["count"] == len(kind["layers"])
        for decisions in kind["sites"].values():
            for decision in decisions:
                assert set(decision) == {"fusion", "decision", "reason", "tokens", "sites"}
    mla = data["kinds"][kinds.index("mla")]
    assert mla["spec"]["num_heads"] == 32
    assert mla["spec"]["num_local_heads"] == 8
    assert mla["spec"]["q_norm"] is None
    assert mla["spec"]["derived"]["split_sizes"] == [512, 64]
    assert data["kinds"][1]["spec"]["output_norm"]["activation"] == "sigmoid"
    help_text = run("plan", "--help").out
    assert all(key in help_text for key in data)


def test_without_torch_a_backend_that_does_not_exist_has_no_plan_either(run_python):
    alone = run_python("-m", "layerfuse", "plan", "deepseek-v3", env={"LAYERFUSE_BACKEND": "trition"})
    assert (alone.code, alone.out) == (2, "")
    assert alone.err.startswith("layerfuse: LAYERFUSE_BACKEND=trition: no op has a backend called 'trition'")


@pytest.mark.parametrize("columns", [None, "60"])
def test_a_line_to_copy_is_whole(run, monkeypatch, columns):
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    found = [line for line in run("plan", "deepseek-v3").out.splitlines() if line.startswith("LAYERFUSE_FUSIONS=+")]
    names = ("rms_norm", "add_rms_norm", "mla_dual_rms_norm", "silu_mul")
    assert found == ["LAYERFUSE_FUSIONS=" + ",".join(f"+{name}_group_quant" for name in names)]


def test_the_picture_is_svg_and_always_the_same(run, tmp_path):
    file = tmp_path / "plan.svg"
    assert run("plan", "kimi-k2.5", "--tp", 8, "--svg", file).out == f"wrote {file}\n"
    first = file.read_text(encoding="utf-8")
    assert ElementTree.fromstring(first).tag.endswith("svg")
    assert "1536" in first
    run("plan", "kimi-k2.5", "--tp", 8, "--svg", file)
    assert file.read_text(encoding="utf-8") == first


def test_a_pipe_gets_no_escape_codes_and_footnotes_of_100_columns(run_python):
    answer = run_python("-m", "layerfuse", "plan", "kimi-k2.5", "--tp", "8")
    assert answer.out == KIMI


def test_no_color_and_narrow_terminals(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    out = run("plan", "kimi-k2.5", "--tp", 8, "-v").out
    assert "\x1b[1m" in out  # bold is no colour
    assert not re.search("\x1b\\[[0-9;]*3[0-9]m", out)
    assert max(len(line) for line in re.sub("\x1b\\[[0-9;]*m", "", out).splitlines()) <= 60


def test_every_declared_model_can_be_planned(run):
    for name in registry.models():
        assert run("plan", name).code == 0


# ---- terminals, numbers, files


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_a_terminal_without_arrows_gets_others(run_python, encoding):
    answer = run_python("-m", "layerfuse", "plan", "kimi-k2.5", "--all-tp", env={"PYTHONIOENCODING": encoding})
    assert (answer.code, answer.err) == (0, "")
    assert "heads of a rank -> heads of the kernel" in answer.out
    assert "4->16 75%" in answer.out


def test_a_name_that_a_terminal_cannot_show_is_no_error(run_python, tmp_path):
    file = tmp_path / "\u4e2d.toml"
    file.write_text("", encoding="utf-8")
    answer = run_python("-m", "layerfuse", "check", str(file), env={"PYTHONIOENCODING": "ascii"})
    assert (answer.code, answer.err) == (1, "")
    assert r"\u4e2d.toml: declares no models" in answer.out


def test_the_table_that_the_docs_show_is_the_one_that_is_printed(run):
    page = (Path(__file__).parent.parent.parent / "docs" / "fusions.md").read_text(encoding="utf-8")
    shown = re.search(r"```text\n(fusion +sites .*?)```", page, re.DOTALL)[1]
    assert run("plan", "deepseek-v3", "--target", "gfx950", "--quant", "none").out.endswith(shown)


def test_the_config_of_a_declared_model_is_that_model_quantised_as_it_says_itself(run):
    unquantised = run("plan", "kimi-k2.5", "--tp", 8, "--quant", "none").out
    declared = run("plan", KIMI_CONFIG, "--tp", 8)
    # All but what no one has said of it: whether its linears quantise.
    lines, others = (
        {re.sub(r" +|─+", " ", line) for line in re.sub(r"\n {4,}", " ", each).splitlines()}
        for each in (declared.out, unquantised)
    )
    assert lines ^ others and all("activation" in line or line.startswith("rank ") for line in lines ^ others)
    assert declared.err == ""
    assert run("plan", KIMI_CONFIG.parent, "--tp", 8).out == declared.out
