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

GOOD = """
[models.mine]
adapter = "gpt_oss"
source = "a test"
num_hidden_layers = 2
hidden_size = 64
rms_norm_eps = 1e-6

[models.mine.layers.full]
family = "gqa"
num_heads = 4
num_kv_heads = 2
head_dim = 16
sliding_window = "off"
has_sinks = false

[models.mine.layer_classes]
"mine:Attention" = { like = "transformers:Qwen3NextAttention" }
"""


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


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(run, shell):
    assert "_LAYERFUSE_COMPLETE" in run("completion", shell).out


def test_completion_knows_the_models(run_python):
    env = {"_LAYERFUSE_COMPLETE": "bash_complete", "COMP_WORDS": "layerfuse plan kimi", "COMP_CWORD": "2"}
    out = run_python("-c", "from layerfuse.cli import main; main()", env=env).out
    assert "plain,kimi-k2.5" in out


# ---- check


def test_check_counts_what_is_fine(run, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(GOOD, encoding="utf-8")
    answer = run("check", file)
    assert (answer.code, answer.out) == (0, "1 model, 1 layer class: all fine\n")


def test_check_prints_every_problem_of_every_file(run, tmp_path):
    first, second = tmp_path / "first.toml", tmp_path / "second.toml"
    first.write_text(GOOD.replace("num_heads = 4", "num_heds = 4").replace("= 64", '= "64"'), encoding="utf-8")
    second.write_text(GOOD.replace('"gpt_oss"', '"gpt_os"'), encoding="utf-8")
    answer = run("check", first, second)
    assert answer.code == 1
    assert f"{first}: " in answer.out
    assert "'num_heds'; did you mean 'num_heads'" in answer.out
    assert "expected a whole number, got '64' @ $.models.mine.hidden_size" in answer.out
    assert f"{second}: no adapter 'gpt_os' is registered; did you mean 'gpt_oss'" in answer.out


def test_no_mistake_of_a_file_hides_another(run, tmp_path):
    """In the entry that cannot be read, and in a good one beside it: an unknown adapter, engine, and class to be like."""
    file = tmp_path / "mine.toml"
    wrong = GOOD.replace('"gpt_oss"', '"gpt_os"\nengines.vlm = { rms_norm_eps = 1e-6 }').replace(
        "Qwen3NextAttention", "Qwen3NexAttention"
    )
    file.write_text(wrong.replace("= 64", '= "64"') + wrong.replace("mine", "other"), encoding="utf-8")
    answer = run("check", file)
    assert answer.code == 1
    lines = [line.removeprefix(f"{file}: ") for line in answer.out.splitlines()]
    assert lines[0] == "expected a whole number, got '64' @ $.models.mine.hidden_size"
    for name in ("mine", "other"):
        assert f"no adapter 'gpt_os' is registered; did you mean 'gpt_oss'? @ $.models.{name}.adapter" in lines
        assert f"engines: no layer class of 'vlm' is known; did you mean 'vllm'? @ $.models.{name}.engines" in lines
        (like,) = [line for line in lines if line.endswith(f"$.models.{name}.layer_classes.'{name}:Attention'")]
        assert like.startswith("like: no class 'transformers:Qwen3NexAttention' is known; the closest known are")
    assert len(lines) == 7
    # A table that says none of it has the mistakes that it has.
    file.write_text("[models.mine]\nadapter = 3\nengines = 4\nlayer_classes = 'x'\n", encoding="utf-8")
    assert "expected a text, got 3 @ $.models.mine.adapter" in run("check", file).out


def test_check_of_a_file_that_is_not_there(run, tmp_path):
    answer = run("check", tmp_path / "none.toml")
    assert answer.code == 2
    assert "does not exist" in answer.err


def test_a_file_that_is_not_there_is_a_wrong_question_everywhere(run, tmp_path):
    assert run("inspect", tmp_path / "none.json").code == 2
    assert run("inspect", tmp_path).code == 2
    assert run("models", "--models", tmp_path / "none.toml").code == 2
    assert "a file that does not exist" in run("--help").out


def test_check_of_a_file_without_models(run, tmp_path):
    file = tmp_path / "empty.toml"
    file.write_text("", encoding="utf-8")
    answer = run("check", file)
    said = f"{file}: declares no models; expected a table [models.<name>] @ $\n"
    assert (answer.code, answer.out) == (1, said)
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("x = 1", encoding="utf-8")
    answer = run("check", file, wrong)
    assert answer.code == 1
    assert f"{wrong}: unknown table 'x'" in answer.out and said in answer.out


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
@pytest.mark.parametrize("command", ["models", "plan kimi-k2.5", "plan kimi-k2.5 --json", "--version"])
def test_a_reader_that_has_gone_is_no_error(command, unbuffered):
    read, write = os.pipe()
    os.close(read)
    done = _into(write, *command.split(), PYTHONUNBUFFERED=unbuffered)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


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


def test_check_tells_that_a_shipped_model_is_redeclared(run, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(GOOD.replace("models.mine", 'models."deepseek-v3"'), encoding="utf-8")
    answer = run("check", file)
    assert answer.code == 1
    assert "deepseek-v3 is declared differently by" in answer.out


# ---- contract


def test_contract_of_an_unknown_model(run):
    assert run("contract", "no-such-model").code == 2


def test_contract_of_a_model_that_cannot_be_built_is_not_kept(run):
    answer = run("contract", "kimi-k3")
    assert (answer.code, answer.out) == (1, "")
    assert (
        "kimi-k3 was held to nothing: transformers (read up to 5.24) has no kimi_k3; vLLM's layers of it are read"
        in answer.err
    )
    assert "a subclass of layerfuse.testing.AdapterContract with a build() of your own" in answer.err


def test_contract_of_a_model_that_only_a_file_names(run, tmp_path, op_by_op):
    """Whatever transformers has a config class for is built, without a recipe of this library's."""
    file = tmp_path / "mine.toml"
    file.write_text(YOUTU, encoding="utf-8")
    answer = run("contract", "mine", "--models", file, "--json")
    outcomes = {result["scenario"]: result["outcome"] for result in json.loads(answer.out)}
    assert answer.code == 0
    assert [scenario for scenario, outcome in outcomes.items() if outcome != "passed"] == ["C11"]

    file.write_text(YOUTU.replace("{ latent_norm_eps = 1e-6 }", "{ latent_norm_eps = 1e-5 }"), encoding="utf-8")
    assert run("contract", "mine", "--models", file).code == 1


YOUTU = """
[models.mine]
adapter = "deepseek_v3"
model_type = "youtu"
source = "made up for a test"
num_hidden_layers = 2
hidden_size = 256
rms_norm_eps = 1e-5
engines.transformers = { latent_norm_eps = 1e-6 }

[models.mine.layers.mla]
family = "mla"
num_heads = 8
q_lora_rank = 48
kv_lora_rank = 32
qk_nope_head_dim = 16
qk_rope_head_dim = 8
v_head_dim = 24
rope = { interleaved = true }

[models.mine.mlps.dense]
intermediate_size = 96
activation = "silu"

[models.mine.layer_classes]
"transformers:YoutuAttention" = { like = "transformers:DeepseekV3Attention" }
"transformers:YoutuMLP" = { like = "transformers:DeepseekV3MLP" }
"transformers:YoutuDecoderLayer" = { like = "transformers:DeepseekV3DecoderLayer" }
"transformers:YoutuModel" = { like = "transformers:DeepseekV3Model" }
"""


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
