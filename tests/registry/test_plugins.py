"""Plugins: a tiny real package is installed and found by its entry points; clashing and broken ones are told apart.

Most cases stand in plugins.txt:

    + tiny            beside the tiny package
    > NAME GROUP      the lines that follow, up to `<`, are a package whose THING is an entry point of this group
    ? code            what is asked, in a Python of its own, with ASK in front of it
    line              each that it prints
    ! words           each warning; `...` at its end stands for any others
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT, run_python

PLUGIN = ROOT / "tests" / "plugin"
CASES = (Path(__file__).parent / "plugins.txt").read_text(encoding="utf-8").split("\n\n")

ASK = """
import sys
from types import SimpleNamespace as Some

from layerfuse import registry

def layer(name, module="tinylib.layers", bases=(), **held):
    return type(name, bases, {"__module__": module})(**held)

def layer_of_tiny():
    norm = Some(weight=Some(shape=(16,)), eps=1e-6)
    held = dict(heads={"all": 4, "mine": 2}, latent=16, nope=8, value=8, latent_norm=norm, scale=0.5, width=64, index=1)
    return layer("Mixer", bases=(Some,), **held)

QUESTIONS = {
    "known": lambda: registry.spec_for(layer("MLAAttention", "vllm.x")),
    "shared": lambda: registry.spec_for(layer("SharedMixer")),
    "first": lambda: registry.spec_for(layer("firstMixer")),
    "second": lambda: registry.adapter_for(layer("secondMixer")),
    "unknown": lambda: registry.spec_for(layer("NobodysMixer")),
    "model": lambda: registry.model("deepseek-v3"),
    "models": registry.models,
    "adapters": registry.adapters,
    "classes": registry.layer_classes,
}

def answer(question):
    try:
        return str(question())
    except Exception as error:
        return f"{type(error).__name__}: {error}"

def ask(name):
    return answer(QUESTIONS[name])
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plugin, installed by pip into a folder of its own."""
    source, target = tmp_path_factory.mktemp("source") / "plugin", tmp_path_factory.mktemp("site")
    shutil.copytree(PLUGIN, source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build"))
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"),
            *("--disable-pip-version-check", "--target", str(target), str(source)),
        ],
        check=True,
        capture_output=True,
    )
    return target


def write_plugin(site: Path, name: str, group: str, value: str, code: str, **files: str) -> None:
    """A package and its metadata as an installer would have left them."""
    (site / f"{name}.py").write_text(code)
    for file, text in files.items():
        (site / file.replace("_toml", ".toml")).write_text(text)
    info = site / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n")


def run(code: str, *sites: Path, warnings: str = "default") -> list[str]:
    done = run_python(code, *sites, PYTHONWARNINGS=warnings)
    assert done.returncode == 0, done.stderr
    return [*done.stdout.splitlines(), *[line for line in done.stderr.splitlines() if "Warning" in line]]


@pytest.mark.parametrize("case", CASES, ids=[case.splitlines()[0][2:72] for case in CASES])
def test_what_plugins_bring(case: str, tmp_path: Path, installed: Path) -> None:
    for name, group, code in re.findall(r"^> (\S+) (\S+)\n(.*?)^<$", case, re.MULTILINE | re.DOTALL):
        write_plugin(tmp_path, name, group, f"{name}:THING", code)
    lines = re.sub(r"^> .*?^<$\n", "", case.strip(), flags=re.MULTILINE | re.DOTALL).splitlines()[1:]
    code = "\n".join(line[2:] for line in lines if line.startswith("? "))
    answers = [line for line in lines if line[:2] not in ("? ", "! ", "+ ")]
    warnings = [line[2:] for line in lines if line.startswith("! ")]
    said = run(ASK + code, tmp_path, *([installed] if "+ tiny" in lines else []))
    assert code and answers and said[: len(answers)] == answers
    for line, words in zip(said[len(answers) :], warnings, strict=True):
        found = line.partition(": RuntimeWarning: ")[2] or line.partition("RuntimeWarning: ")[2]
        assert found.startswith(words.removesuffix("...")) if words.endswith("...") else found == words


def test_a_path_may_be_an_entry_points_object(tmp_path: Path) -> None:
    text = (PLUGIN / "layerfuse_tiny" / "models.toml").read_text()
    text = text[: text.index("[models.tiny-mixer.layer_classes]")].replace('"tiny"', '"deepseek_v3"')
    code = "from pathlib import Path\nFILE = Path(__file__).parent / 'theirs.toml'"
    write_plugin(tmp_path, "paths", "layerfuse.models", "paths:FILE", code, theirs_toml=text)
    said = run("from layerfuse import registry\nprint(registry.model('tiny-mixer').source)", tmp_path)
    assert said == ["made up for the tests of entry points"]


def test_a_plugin_whose_package_has_lost_its_metadata_is_named_all_the_same(tmp_path: Path) -> None:
    write_plugin(tmp_path, "torn", "layerfuse.adapters", "torn:ADAPTER", "import no_such_library")
    (tmp_path / "torn-1.0.dist-info" / "METADATA").unlink()
    said = run(ASK + "print(ask('model')[:10], ask('unknown').split(':')[0])", tmp_path)
    assert said[0] == "ModelEntry UnknownLayerError"
    assert "the plugin torn of a package without metadata (torn:ADAPTER) cannot be imported" in said[1]


MALFORMED = [b"[console_scripts]\nno equals sign\n", b"[layerfuse.adapters]\n\xff = x:Y\n"]


@pytest.mark.parametrize("entry_points", MALFORMED)
def test_a_package_with_broken_entry_points_is_named_and_hides_no_other(
    entry_points: bytes, tmp_path: Path, installed: Path
) -> None:
    write_plugin(tmp_path, "torn", "other.group", "torn:X", "X = 1")
    (tmp_path / "torn-1.0.dist-info" / "entry_points.txt").write_bytes(entry_points)
    said = run(
        "from layerfuse import fusion, registry\nprint('tiny' in registry.adapters(), 'add_rms_norm' in fusion.FUSIONS)",
        tmp_path,
        installed,
    )
    assert said[0] == "True True"
    assert len(said) == 2  # where plugins of the registry are looked for; of fusions no package names an entry point
    where = tmp_path / "torn-1.0.dist-info"
    assert all(f"RuntimeWarning: the entry points of torn in {where} cannot be read" in line for line in said[1:])


def test_of_two_installations_of_a_package_the_one_that_python_imports_counts(tmp_path: Path, installed: Path) -> None:
    """Beside a broken package too, where packages are looked through one by one."""
    first, second = tmp_path / "first", tmp_path / "second"
    for site in (first, second):
        site.mkdir()
        write_plugin(site, "twice", "layerfuse.adapters", f"twice:{site.name.upper()}", "")
    write_plugin(first, "torn", "other.group", "torn:X", "X = 1")
    code = (
        "from layerfuse.registry.plugins import installed\nprint([p.value for p in installed() if p.name == 'twice'])"
    )
    assert run(code, first, second) == ["['twice:FIRST']"]
    (first / "torn-1.0.dist-info" / "entry_points.txt").write_bytes(MALFORMED[0])
    assert run(code, first, second)[0] == "['twice:FIRST']"
