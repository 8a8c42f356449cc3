import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import layerfuse
from layerfuse import __version__, registry
from layerfuse._version import commit_of
from layerfuse.registry.defaults import fresh

COMMANDS = (
    "models",
    "plan",
    "specs",
    "diff",
    "verify",
    "inspect",
    "check",
    "doctor",
    "contract",
    "bench",
    "bisect",
    "completion",
)


def test_version(run, monkeypatch):
    commit = commit_of(Path(layerfuse.__file__).parent)
    assert run("--version").out == f"layerfuse {__version__}{f' ({commit})' if commit else ''}\n"
    monkeypatch.setattr("layerfuse._version.commit_of", lambda _: None)
    assert run("--version").out == f"layerfuse {__version__}\n"


@pytest.mark.skipif(shutil.which("git") is None, reason="no git here")
def test_the_commit_is_that_of_the_checkout_itself_or_of_what_was_built(tmp_path):
    """An environment inside of somebody's repository is none of its commits."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    inside = tmp_path / ".venv" / "layerfuse"
    inside.mkdir(parents=True)
    (tmp_path / "models.toml").write_text("", encoding="utf-8")
    assert commit_of(tmp_path) is None
    subprocess.run([*git, "init", "-q"], check=True)
    assert commit_of(tmp_path) is None  # no commit yet
    subprocess.run([*git, "add", "models.toml"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "one"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
    assert len(commit_of(tmp_path)) == 12 and head.startswith(commit_of(tmp_path))
    assert commit_of(inside) is None
    (tmp_path / "models.toml").write_text("#", encoding="utf-8")
    assert commit_of(tmp_path) == f"{head[:12]}-dirty"
    (inside / "commit.txt").write_text("abc\n", encoding="utf-8")
    assert commit_of(inside) == "abc"


def test_help_lists_every_command_and_the_exit_codes(run):
    out = run("--help").out
    assert all(re.search(rf"^  {command} ", out, re.MULTILINE) for command in COMMANDS)
    assert "1  the answer is no, or problems were found" in out


def test_no_line_of_the_list_of_commands_is_cut(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = run("--help").out.partition("\nCommands:\n")[2].splitlines()
    assert [line.split()[0] for line in lines] == sorted(COMMANDS)
    assert not any("..." in line for line in lines)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_s_help_has_an_example(run, command):
    answer = run(command, "--help")
    assert answer.code == 0
    assert re.search(rf"Examples?:\n.*layerfuse {command}", answer.out)


def test_no_command_shows_the_help(run):
    answer = run()
    assert answer.code == 2
    assert "Usage:" in answer.out + answer.err


def test_models_lists_all(run):
    out = run("models").out
    assert all(name in out for name in registry.models())
    data = json.loads(run("models", "--json").out)
    assert [entry["model"] for entry in data] == list(registry.models())
    assert {alias for entry in data for alias in entry["aliases"]} >= {"kimi-k2", "deepseek", "v3", "gpt-oss"}
    assert re.search(r"kimi-k2-instruct +kimi-k2, k2 ", out)
    assert next(e for e in data if e["model"] == "kimi-linear-48b-a3b")["kinds"] == {"kda": 20, "mla": 7}


def test_completion_knows_the_models(run_python):
    env = {"_LAYERFUSE_COMPLETE": "bash_complete", "COMP_WORDS": "layerfuse plan kimi", "COMP_CWORD": "2"}
    out = run_python("-c", "from layerfuse.cli import main; main()", env=env).out
    assert "plain,kimi-k2.5" in out


@pytest.mark.parametrize("columns", ["20", "40", "60", "80"])
def test_no_terminal_is_too_narrow_for_the_names(run, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    lines = run("models").out.splitlines()
    assert set(registry.models()) <= {line.split()[0] for line in lines if line.strip()}
    assert "…" not in "".join(lines)


# ---- output that cannot be written


def _into(stdout, *arguments, **env):
    return subprocess.run(
        [sys.executable, "-m", "layerfuse", *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        env={**os.environ, **env},
    )


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("models", 0),
        ("plan kimi-k2.5", 0),
        ("plan kimi-k2.5 --json", 0),
        ("--version", 0),
        (f"check {Path(layerfuse.__file__).with_name('models.toml')}", 141),
    ],
)
def test_a_reader_that_has_gone_is_no_error_and_no_yes(command, code, unbuffered):
    read, write = os.pipe()
    os.close(read)
    done = _into(write, *command.split(), PYTHONUNBUFFERED=unbuffered)
    os.close(write)
    assert (done.returncode, done.stderr) == (code, "")


def test_each_command_answers_by_its_exit_code_or_lists():
    from layerfuse.cli.main import ANSWERS

    assert sorted([*ANSWERS, "models", "plan", "specs", "completion"]) == sorted(COMMANDS)


@pytest.mark.skipif(sys.platform == "win32", reason="a shell of Unix closes it")
@pytest.mark.parametrize("command", ["models", "plan kimi-k2.5", "doctor"])
def test_a_closed_stdout_is_said(command):
    program = [sys.executable, "-m", "layerfuse", *command.split()]
    done = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *program], stderr=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (1, "layerfuse: cannot write output: stdout is closed\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
@pytest.mark.parametrize("command", ["models", "--help"])
def test_a_full_disk_is_said_once(command):
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = _into(full, *command.split())
    assert (done.returncode, done.stderr) == (1, "layerfuse: cannot write output: No space left on device\n")


def test_an_interrupt_is_said_without_a_traceback(run, monkeypatch):
    from layerfuse.cli import listing

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(listing, "list_models", interrupted)
    answer = run("models")
    assert (answer.code, answer.err) == (130, "layerfuse: interrupted\n")


# ---- contract


@pytest.mark.parametrize(
    ("arguments", "variable"),
    [
        (["plan", "kimi-k2.5", "--target", "sm90", "--engine", "vllm", "--engine-version", "x" * 100_000], None),
        (["plan", "x" * 100_000], None),
        (["plan", "kimi-k2.5", "--target", "x" * 100_000], None),
        (["plan", "kimi-k2.5"], "LAYERFUSE_FUSIONS"),
        (["bench", "silu_mul_group_quant", "--quick", "--device", "cpu", "--peers", "layerfuse"], "LAYERFUSE_BACKEND"),
    ],
)
def test_what_was_given_is_echoed_cut(run, monkeypatch, arguments, variable):
    if variable is not None:
        monkeypatch.setenv(variable, "x" * 100_000)
    answer = run(*arguments)
    assert answer.code in (1, 2)
    assert 0 < len(answer.out + answer.err) < 3_000
    assert "x" * 60 in answer.err
    assert "..." in answer.err


@pytest.mark.parametrize(("command", "brief"), [(["plan", "kimi-k2.5"], True), (["completion", "bash"], False)])
def test_a_brief_command_leaves_nothing_to_look_through_before_its_end_and_at_it(run_python, command, brief):
    """Python looks for cycles as objects are made, and as it ends: in a plan's, all of which are in use until then."""
    code = (
        "import gc, sys\n"
        "from layerfuse.cli import main\n"
        f"sys.argv[1:] = {command!r}\n"
        "frozen = []\n"
        "gc.callbacks.append(lambda phase, _: frozen.append(gc.get_freeze_count()))\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(gc.isenabled(), gc.get_freeze_count() > 0, 0 not in frozen)"
    )
    assert run_python("-c", code).out.splitlines()[-1] == f"True {brief} {brief}"


def test_a_brief_command_behind_which_triton_is_imported_says_nothing_of_leaks(run_python):
    """A package of fusions may import it, as torch's pattern matcher does."""
    pytest.importorskip("triton")
    code = "import sys, triton._C.libtriton\nsys.argv[1:] = ['models']\nfrom layerfuse.cli import main\nmain()"
    answer = run_python("-c", code)
    assert (answer.code, answer.err) == (0, "")


@pytest.mark.parametrize(
    "command", [["contract"], ["bisect", "prompts.json"], ["contract", "--weights", "."], ["specs", "--names"]]
)
def test_a_command_builds_one_registry(run, monkeypatch, tmp_path, command):
    """Each further one costs its models, and asks plugins again."""
    monkeypatch.chdir(tmp_path)
    config = {
        "num_key_value_heads": 2,
        "num_attention_heads": 4,
        "head_dim": 64,
        "hidden_size": 256,
        "model_type": "new",
    }
    Path("config.json").write_text(json.dumps({**config, "num_hidden_layers": 2, "rms_norm_eps": 1e-6}))
    Path("prompts.json").write_text("no tokens")
    made = []
    monkeypatch.setattr("layerfuse.registry.defaults.fresh", lambda: made.append(fresh()) or made[-1])
    assert run(command[0], "config.json", *command[1:]).code in (1, 2)
    assert len(made) == 1
