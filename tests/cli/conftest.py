"""Running the command line inside the test process, and outside of it where what is imported matters."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs
import pytest
import torch
from attrs import frozen

from layerfuse import registry
from layerfuse.cli import main
from layerfuse.fusion import FUSIONS
from layerfuse.fusion.backends import aiter as amd
from layerfuse.registry import files
from layerfuse.registry.toml import written


@frozen
class Answer:
    code: int
    out: str
    err: str


@pytest.fixture
def silent_models(tmp_path: Path) -> Path:
    """A file with gpt-oss, which says nothing of its experts."""
    entry = registry.model("gpt-oss-120b")
    silent = attrs.evolve(entry, name="silent-gpt-oss", aliases=[], hf_id=None, experts=None, layer_classes={})
    path = tmp_path / "silent.toml"
    path.write_text(written(files.unstructure({silent.name: silent})), encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def _no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """What whoever runs the tests has set about their terminal (pytest-xdist sets COLUMNS) is not what is tested."""
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Packages that look installed, which raise where they are imported: `packages("aiter", "amd-aiter", "0.1.15")`."""
    monkeypatch.syspath_prepend(str(tmp_path))
    made = []

    def make(module: str, dist: str, version: str, entry_point: str = "", files: Sequence[str] = ()) -> Path:
        """`entry_point`: its group in brackets, and the line below it."""
        made.append(module)
        for file in ("__init__.py", *files):
            path = tmp_path / module / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("raise RuntimeError('this package must not be imported')\n", encoding="utf-8")
        info = tmp_path / f"{dist.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n", encoding="utf-8")
        if entry_point:
            (info / "entry_points.txt").write_text(entry_point.replace("] ", "]\n"), encoding="utf-8")
        amd.forget()
        FUSIONS.forget()
        return tmp_path / module

    yield make
    for module in made:  # tests name their packages alike
        sys.modules.pop(module, None)
    amd.forget()
    FUSIONS.forget()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    def run(*arguments: object) -> Answer:
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Answer(int(exit_.value.code or 0), captured.out, captured.err)

    return run


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[..., Answer]:
    def run(*arguments: str, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> Answer:
        done = subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=cwd or tmp_path,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
        )
        return Answer(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def op_by_op(monkeypatch):
    """Compiled graphs run op by op: the passes and the report are real, the C++ compiler is spared."""
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", lambda graph_module, _inputs, **_: graph_module)
    compile_ = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda model, backend=None: compile_(model, backend=backend) if backend else model
    )
