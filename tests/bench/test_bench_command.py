"""`layerfuse bench` as it is typed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from layerfuse.bench.cases import forms, forms_over_ranks, known_form
from layerfuse.bench.result import Result
from layerfuse.cli import main
from layerfuse.fusion import FUSIONS

ROOT = Path(__file__).parents[2]

TINY = [
    "--widths",
    "256,128,16",
    "--tokens",
    "1,5",
    "--device",
    "cpu",
    "--quick",
    "--peers",
    "layerfuse (reference),eager,copy",
]


@pytest.fixture
def type_in(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)

    def run(*arguments):
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main(["bench", *arguments])
        return left.value.code, *capsys.readouterr()

    return run


def test_tables_on_stdout_progress_on_stderr_and_files_here(type_in, tmp_path):
    code, out, err = type_in("mla_dual_rms_norm", *TINY)
    assert code == 0
    assert "Microseconds per call\n" in out
    head = next(line for line in out.splitlines() if "sets" in line)
    assert head.split() == ["tokens", "sets", "copy", "layerfuse", "(reference)", "eager"]
    rows = [line.split() for line in out.splitlines() if line.split()[:1] in (["1"], ["5"])]
    assert [(row[0], len(row)) for row in rows[:4]] == [("1", 5), ("5", 5), ("1", 3), ("5", 3)]
    assert err.startswith("[1/8] 1 token: layerfuse (reference)\n")
    assert "[8/8]" in err.splitlines()[-1]
    files = sorted(path.name for path in tmp_path.iterdir())
    assert [name.rsplit(".", 1)[1] for name in files] == ["json", "md", "svg"]
    assert all(name in out for name in files)


def test_json_is_the_result_alone(type_in, tmp_path):
    code, out, _ = type_in("mla_dual_rms_norm_group_quant", *TINY, "--json", "--out", "there")
    assert code == 0
    (file,) = (tmp_path / "there").glob("*.json")
    assert Result.from_dict(json.loads(out)) == Result.from_dict(json.loads(file.read_text()))


def test_several_are_measured_in_turn_and_their_json_is_a_list(type_in, tmp_path):
    """Of one width and of two: so at a model's."""
    options = ["--tokens", "1", "--device", "cpu", "--quick", "--peers", "layerfuse (reference)", "--json"]
    code, out, _ = type_in("add_rms_norm", "mla_dual_rms_norm", "--model", "glm-4.7-flash", *options)
    assert code == 0
    assert [one["case"]["fusion"] for one in json.loads(out)] == ["add_rms_norm", "mla_dual_rms_norm"]


def test_without_a_name_it_is_every_form_of_every_fusion_that_has_a_site(type_in, another, monkeypatch):
    another()
    monkeypatch.setattr("layerfuse.bench.plot.why_not", lambda: "fifty drawings take longer than all else")
    options = ["--tokens", "1", "--device", "cpu", "--quick", "--peers", "layerfuse (reference)", "--json"]
    code, out, err = type_in(*options)
    assert code == 0
    left_out = [line.split(" where ")[1].split()[0] for line in err.splitlines() if line.startswith("left out: ")]
    cases = [one["case"] for one in json.loads(out)]
    measured = [case["op"] for case in cases]
    assert sorted(measured + left_out) == sorted(form.op.name for _, form in (forms() | forms_over_ranks()).values())
    assert "add_rms_norm_pad" in measured and "gated_rms_norm_static_quant" in measured
    # Processes are started for what begins with an all-reduce alone.
    assert all(case["ranks"] == (2 if case["op"].startswith("all_reduce") else 1) for case in cases)


def test_the_list_says_what_is_measured_and_by_what_the_rest_is(type_in, another):
    fusion = another()
    code, out, _ = type_in("--list")
    assert code == 0
    here, there = out.split("\n\n")
    listed = [line.split()[0] for line in here.splitlines()]
    assert all(known_form(name)[1].op.name == name for name in listed) and set(listed) == {
        *forms(),
        *forms_over_ranks(),
    }
    assert f"{fusion.doc} ({fusion.owner})" in here
    elsewhere = {line.split()[0]: line.rpartition("; ")[2] for line in there.splitlines()[1:]}
    assert {*listed, *elsewhere} >= {*FUSIONS} and not elsewhere.keys() & listed
    assert elsewhere["mla_decode_group_quant"] == "bench/scripts: vllm_engine.py"  # SGLang has no place for it
    for name, where in elsewhere.items():
        folder, _, scripts = where.partition(": ")
        assert all((ROOT / folder / script).is_file() for script in scripts.split(" and "))
        code, _, err = type_in(name)
        assert code == 2 and f"measured by {where}" in err


def test_the_help_fits_a_screen(type_in, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert len(type_in("--help")[1].splitlines()) <= 40


def test_in_the_repository_they_go_to_its_results(type_in, tmp_path):
    (tmp_path / "bench" / "results").mkdir(parents=True)
    (tmp_path / "models.toml").touch()
    type_in("mla_dual_rms_norm", *TINY)
    assert len(list((tmp_path / "bench" / "results").glob("mla_dual_rms_norm-*"))) == 3


def test_a_wrong_peer_makes_it_exit_with_1(type_in, peer):
    peer(lambda q, kv: (q * 1.02, kv))
    code, out, _ = type_in("mla_dual_rms_norm", *TINY[:-1], "broken,copy")
    assert code == 1
    assert "broken wrong at 5 tokens: a norm is off by" in out


def test_without_a_name_a_peer_is_measured_where_it_is_known_and_unknown_where_it_never_is(type_in):
    options = ["--group-size", "64", "--tokens", "1", "--device", "cpu", "--quick", "--json"]
    code, out, err = type_in(*options, "--peers", "eager")
    assert code == 0
    assert len(json.loads(out)) > 1
    assert "left out: no peer is called 'eager'" in err
    code, out, err = type_in(*options, "--peers", "eagr")
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("layerfuse: no peer is called 'eagr'")


def in_a_python_without(module, code, tmp_path):
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.modules[{module!r}] = None\n{code}"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TRITON_INTERPRET": "0"},
        check=False,
        timeout=120,
    )


def test_without_matplotlib_the_plot_is_left_out_and_said_so(tmp_path):
    code = f"from layerfuse.cli import main; main(['bench', 'mla_dual_rms_norm', *{TINY!r}])"
    done = in_a_python_without("matplotlib", code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "the plot was left out: matplotlib is not installed; pip install 'layerfuse[plot]'" in done.stdout
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".md"]


@pytest.mark.parametrize("fusion", ["mla_dual_rms_norm", "all_reduce_add_rms_norm"])
def test_without_torch_it_says_how_to_install_it(tmp_path, fusion):
    done = in_a_python_without("torch", f"from layerfuse.cli import main; main(['bench', '{fusion}'])", tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "layerfuse: torch is not installed; pip install torch, or pip install '.[torch]' in a checkout of layerfuse\n"
    )
