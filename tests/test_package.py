"""The wheel: everything that is needed, nothing with a generic name, and it works where nothing else is installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from helpers import ROOT, run_copy

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DATA = ("models.toml", "models.json", "models.schema.json", "specs.schema.json", "policy.toml", "py.typed")
FOLDERS = ("adapters", "bench", "cli", "engines", "fusion", "registry", "testing")


def packages_in_repository() -> set[str]:
    """Every folder of the floors that holds Python, but for the scripts that only we run."""
    found = {"layerfuse"}
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            if not {"__pycache__", "scripts"} & {*path.parts}:
                found.add(".".join(("layerfuse", *path.relative_to(ROOT).parts[:-1])))
    return found


def run(*command: str | Path, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)), env={**environment, **variables}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout with a commit of its own, so that no build folder appears in the checkout."""
    source = tmp_path_factory.mktemp("source") / "layerfuse"
    listed = ("*.py", "*.pyi", "*.toml", "*.json", "*.md", "LICENSE*", "py.typed")
    shutil.copytree(ROOT, source, ignore=_only(*listed))
    stale = source / "build" / "lib" / "layerfuse" / "fusion" / "gone.py"
    stale.parent.mkdir(parents=True)
    stale.write_text("", encoding="utf-8")  # as an earlier `pip install .` left it
    git = ("git", "-C", source, "-c", "user.name=a", "-c", "user.email=a@b")
    for arguments in (("init", "-q"), ("add", "models.toml"), ("commit", "-q", "-m", "one")):
        run(*git, *arguments)
    return source


def build_wheel(source: Path, out: Path) -> Path:
    run(
        *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"),
        *("--disable-pip-version-check", "--wheel-dir", out, source),
    )
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(source, tmp_path_factory.mktemp("wheel"))


def _only(*patterns: str):  # type: ignore[no-untyped-def]
    """For copytree: what the build needs, and no caches, environments or tests."""
    from fnmatch import fnmatch

    skipped = {"tests", "docs", "build", "dist", "site", "__pycache__", ".git"}

    def ignore(folder: str, names: list[str]) -> set[str]:
        left = {name for name in names if name in skipped or name.startswith((".", "layerfuse.egg"))}
        return left | {
            name
            for name in names
            if not (Path(folder) / name).is_dir() and not any(fnmatch(name, pattern) for pattern in patterns)
        }

    return ignore


@pytest.fixture(scope="module")
def files(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def test_what_was_deleted_since_an_earlier_build_is_not_in_the_wheel(files: set[str]) -> None:
    assert "layerfuse/fusion/planning.py" in files
    assert "layerfuse/fusion/gone.py" not in files


@pytest.mark.parametrize("name", ["layerfuse", "layerfuse-main"])
def test_tests_run_in_a_checkout_of_any_name(tmp_path: Path, name: str) -> None:
    tests = tmp_path / name / "tests"
    tests.mkdir(parents=True)
    for file in ("__init__.py", "__init__.pyi", "pyproject.toml", "tests/conftest.py", "tests/helpers.py"):
        shutil.copy(ROOT / file, tests.parent / file)
    (tests / "test_one.py").write_text("def test_one(): ...\n", encoding="utf-8")
    said = run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests)
    assert "1 passed" in said


def test_every_package_of_the_repository_is_declared_and_in_the_wheel(files: set[str]) -> None:
    packages = packages_in_repository()
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == packages
    assert packages <= {name.rpartition("/")[0].replace("/", ".") for name in files if name.endswith(".py")}


def test_every_module_of_the_repository_is_in_the_wheel(files: set[str]) -> None:
    modules = {
        f"layerfuse/{path.relative_to(ROOT)}"
        for folder in (*FOLDERS, ".")
        for path in (ROOT / folder).glob("*.py" if folder == "." else "**/*.py")
        if not {"__pycache__", "scripts"} & {*path.parts} and path != ROOT / "setup.py"
    }
    assert modules <= files
    assert "layerfuse/setup.py" not in files
    assert {f"layerfuse/{name}" for name in DATA} <= files


def test_packages_are_imported_from_an_archive(wheel: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(wheel)!r}); import layerfuse, layerfuse.fusion as f; print(layerfuse.__file__, *dir(f))"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(str(wheel)) and " plan " in done.stdout


def test_a_package_without_its_public_names_says_which_file_is_missing(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as whole:
        whole.extractall(tmp_path)
    (tmp_path / "layerfuse" / "registry" / "__init__.pyi").unlink()
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import layerfuse.registry"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True)
    assert "registry/__init__.pyi is missing" in done.stderr.splitlines()[-1]
    assert "this installation of layerfuse is incomplete" in done.stderr


def test_nothing_with_a_generic_name_lands_at_the_top(files: set[str]) -> None:
    assert {name.partition("/")[0].partition("-")[0] for name in files} == {"layerfuse"}
    assert not any(
        part in name for name in files for part in ("/tests/", "/scripts/", "/results/", "/docs/", "/.scratch/")
    )


def test_the_core_depends_on_no_torch() -> None:
    dependencies = PROJECT["project"]["dependencies"]
    assert not any(name.lower().startswith(("torch", "transformers", "triton")) for name in dependencies)


def test_the_version_is_the_same_wherever_it_is_said() -> None:
    import layerfuse

    assert layerfuse.__version__ == PROJECT["project"]["version"]
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/vllm.md", "CHANGELOG.md")]
    shown = [re.search(r"^(?:layerfuse |## \[)([\d.]+\d)(?: in vLLM|\])", text, re.MULTILINE) for text in texts]
    assert [found and found[1] for found in shown] == [layerfuse.__version__] * 3


@pytest.mark.slow
def test_a_wheel_and_an_sdist_hold_the_same_and_say_their_commit(source: Path, wheel: Path, tmp_path: Path) -> None:
    """The wheel of the sdist too, which is built where no git is."""
    import layerfuse

    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", tmp_path, source)
    (sdist,) = tmp_path.glob("*.tar.gz")
    again = build_wheel(sdist, tmp_path / "again")
    assert again.name == wheel.name == f"layerfuse-{layerfuse.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(again) as other:
        listed = [
            {i.filename: i.CRC for i in each.infolist() if not i.filename.endswith("/RECORD")} for each in (one, other)
        ]
    assert listed[0] == listed[1]
    head = run("git", "-C", source, "rev-parse", "HEAD").strip()
    for built, folder in ((wheel, tmp_path / "a"), (again, tmp_path / "b")):
        run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", folder, built)
        said = run(
            sys.executable,
            "-c",
            f"import sys; sys.path.insert(0, {str(folder)!r}); from layerfuse.cli import main; main(['--version'])",
        )
        assert said == f"layerfuse {layerfuse.__version__} ({head[:12]})\n"


def test_torch_compile_knows_the_backend_of_the_installed_package(wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", tmp_path, wheel)
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import torch
import torch._inductor.compile_fx as inductor
inductor.compile_fx_inner = lambda gm, _inputs, **_: gm  # the graphs as they are
assert "layerfuse" in torch._dynamo.list_backends()

class Final(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.RMSNorm(64, eps=1e-6)

    def forward(self, x, residual):
        return self.norm(x + residual)

from layerfuse import FinalNormSpec, NormSpec, Parallel, fusion
norm = NormSpec(width=64, epsilon=1e-6)
spec = FinalNormSpec(hidden_size=64, layer_index=1, parallel=Parallel(size=1, rank=0), final_norm=norm)
model = torch.compile(Final(), backend="layerfuse", options={{"strict": True, "specs": [("", spec)]}})
with torch.no_grad():
    rows = torch.randn(2, 3, 64)
    torch.testing.assert_close(model(*rows), model._orig_mod(*rows))
print(fusion.__file__.startswith({str(tmp_path)!r}), fusion.report_of(model).of("add_rms_norm").matched)
"""
    done = run_copy(code)
    assert done.stdout == "True ('final',)\n", done.stderr


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """The Python of a new environment with the wheel and what it depends on, and nothing else."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder)
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
    try:
        run(*pip, "install", "--quiet", wheel)
    except AssertionError as error:
        # In CI an index is always there, and a dependency that it does not have is a mistake.
        signs = ("No matching distribution", "Connection", "Temporary failure")
        if "CI" not in os.environ and any(sign in str(error) for sign in signs):
            pytest.skip("no package index within reach")
        raise
    return python


@pytest.mark.slow
def test_an_empty_environment_resolves_specs_plans_and_finds_its_data(empty: Path, tmp_path: Path) -> None:
    code = """
import importlib.util, pathlib, sys
assert importlib.util.find_spec("torch") is None
import layerfuse
from layerfuse import fusion, registry
assert "site-packages" in layerfuse.__file__
assert (pathlib.Path(layerfuse.__file__).parent / "py.typed").exists()
specs = registry.model("kimi-k2.5").specs(8)
print(len(specs), specs[1][1].num_local_heads)
from types import SimpleNamespace as Some
norm = Some(weight=Some(shape=(512,)), variance_epsilon=1e-6)
held = dict(num_heads=8, num_local_heads=4, hidden_size=64, layer_id=1, scaling=0.1, q_lora_rank=None, kv_lora_rank=512)
held |= dict(qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, kv_a_layernorm=norm, rotary_emb=None)
layer = type("DeepseekV2AttentionMLA", (Some,), {"__module__": "sglang.srt.models.deepseek_v2"})(**held)
print(registry.spec_for(layer).split_sizes, registry.spec_for(layer).parallel.size)
import layerfuse.testing
print(sorted(name for name in ("torch", "numpy", "transformers") if name in sys.modules))
"""
    assert run(empty, "-c", code).splitlines() == ["184 8", "(512, 16) 2", "[]"]


@pytest.mark.slow
def test_the_command_line_plans_in_an_empty_environment(empty: Path, tmp_path: Path) -> None:
    command = empty.parent / "layerfuse"
    said = run(command, "plan", "kimi-k2.5", "--tp", "8", "--target", "gfx950")
    assert "mla" in said.lower() and "61" in said
    assert run(empty, "-m", "layerfuse", "models").count("\n") > 10
    own = tmp_path / "mine.toml"
    text = (ROOT / "models.toml").read_text()
    start = text.index('[models."deepseek-r1"]')
    own.write_text(
        text[start : text.index('[models."deepseek-v3.1"]')].replace('"deepseek-r1"', '"mine"').replace('"r1"', '"m1"')
    )
    assert "mine" in run(command, "models", "--models", own)


@pytest.mark.slow
def test_type_checkers_see_the_types_of_the_installed_package(empty: Path, tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    code = tmp_path / "uses.py"
    code.write_text(
        "from layerfuse import MLASpec, registry\n"
        "spec: MLASpec = registry.spec_for(object(), MLASpec)\n"
        "heads: int = spec.num_heads\n"
        "wrong: str = spec.num_heads\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(empty), str(code)],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert 'error: Incompatible types in assignment (expression has type "int", variable has type "str")' in done.stdout
    assert "Found 1 error" in done.stdout, done.stdout
