"""Every code block of the docs is run, every link leads somewhere, and what is generated is up to date.

`UPDATE_DOCS=1 pytest tests/docs` writes the outputs that pages show.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from doc_blocks import DOCS, blocks_of, expected_outputs, in_own_process, run_command, run_page

from layerfuse import registry
from layerfuse.registry import files
from layerfuse.registry.toml import written

PAGES = sorted(DOCS.glob("*.md"))
WITH = {
    language: [page for page in PAGES if any(block.language == language for block in blocks_of(page.read_text()))]
    for language in ("python", "toml", "console")
}
"""Language -> the pages with a block of it."""
ROOT = DOCS.parent

FRAGMENT_OF_PYPROJECT = "project"
PUBLIC = ("layerfuse", "layerfuse.adapters", "layerfuse.registry", "layerfuse.fusion")
"""All names in `__all__` of these are stable, docs/stable-names.md says."""

SLOW_COMMANDS = ("contract", "verify", "bisect")
"""Run with --help only: they build and compile models, and have tests of their own."""


def _run(command, cwd):
    paths = os.pathsep.join(str(path) for path in [*sys.path] if path)
    return subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": paths, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("page", WITH["python"], ids=lambda page: page.stem)
def test_python_blocks_run_and_print_what_the_page_shows(page, tmp_path):
    text = page.read_text()
    shown = expected_outputs(blocks_of(text))
    assert shown
    outputs = in_own_process(tmp_path, run_page, page)
    if os.environ.get("UPDATE_DOCS"):
        for (_, block), output in reversed(list(zip(shown, outputs, strict=True))):
            if block is not None:
                text = text[: block.start] + output + text[block.end :]
        page.write_text(text)
        return
    for (code, block), output in zip(shown, outputs, strict=True):
        assert output == (block.code if block is not None else ""), code.code


@pytest.mark.parametrize("page", WITH["toml"], ids=lambda page: page.stem)
def test_toml_blocks_are_models_files_or_known_fragments(page):
    declared = {}
    for block in blocks_of(page.read_text()):
        if block.language != "toml":
            continue
        document = tomllib.loads(block.code)
        if FRAGMENT_OF_PYPROJECT in document:
            groups = document["project"]["entry-points"]
            assert set(groups) <= {"layerfuse.adapters", "layerfuse.models", "layerfuse.fusions", "layerfuse.formats"}
            continue
        # A fragment adds to the models that the page declared before it.
        for name, table in document["models"].items():
            for key, value in table.items():
                previous = declared.setdefault(name, {}).get(key)
                declared[name][key] = {**previous, **value} if isinstance(previous, dict) else value
        entries = files.parse(written({"models": declared}))
        registry.fresh().register_models(entries, page.name)


@pytest.mark.parametrize("page", WITH["console"], ids=lambda page: page.stem)
def test_commands_run(page, tmp_path):
    blocks = blocks_of(page.read_text())
    lines = [line for block in blocks if block.language == "console" for line in block.code.splitlines()]
    for block in blocks:
        if block.language == "toml" and block.title:
            (tmp_path / block.title).write_text(block.code)
    for line in lines:
        assert line.startswith("$ layerfuse "), line
        words = line.removeprefix("$ layerfuse ").split()
        if words[0] in SLOW_COMMANDS:
            words = [words[0], "--help"]
        code, printed = in_own_process(tmp_path, run_command, words)
        assert code == 0, f"{line}\n{printed}"


def test_blocks_of_every_language_are_found():
    assert all(WITH.values())


def test_generated_tables_are_up_to_date():
    done = _run([sys.executable, str(DOCS / "generate.py"), "--check"], ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_is_on_by_default_is_said_once_and_first():
    from layerfuse.engines.defaults import on_by_default

    for page, engine in (("sglang.md", "sglang"), ("vllm.md", "vllm")):
        first = (DOCS / page).read_text().split("\n\n")[1]
        assert ("nothing is on by default" in first) == (not on_by_default(engine))
    for page in ("sglang.md", "vllm-measured.md"):
        table = (DOCS / page).read_text().partition("<!-- generated: defaults -->")[2].partition("<!-- end -->")[0]
        measured = [row.partition(" | ")[2] for row in table.splitlines() if " times faster " in row]
        assert len(measured) == len(set(measured)) > 0


def _imported(page):
    """(module, name) of what a page's Python blocks import from this library."""
    return {
        (node.module, alias.name)
        for block in blocks_of((DOCS / page).read_text())
        if block.language == "python"
        for node in ast.walk(ast.parse(block.code))
        if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] == "layerfuse"
        for alias in node.names
    }


AUTHORS = ("adapters.md", "adding-a-model.md", "adding-a-fusion.md", "contract.md", "attention-metadata.md")


@pytest.mark.parametrize("page", AUTHORS)
def test_what_pages_for_authors_import_is_stable(page):
    stable = _imported("stable-names.md")
    public = {name for of in PUBLIC for name in importlib.import_module(of).__all__}
    assert {(module, name) for module, name in _imported(page) - stable if name not in public} == set()


def test_every_group_of_entry_points_is_stable():
    from layerfuse.fusion import catalog, formats
    from layerfuse.fusion.backends import backend
    from layerfuse.registry import plugins

    text = (DOCS / "stable-names.md").read_text()
    groups = (plugins.ADAPTERS, plugins.MODELS, catalog.GROUP, formats.GROUP, backend.GROUP)
    assert all(f"`{group}`" in text for group in groups)


def test_contract_page_has_every_scenario_with_its_title():
    from layerfuse import testing
    from layerfuse.testing.scenario import scenarios_of

    headings = re.findall(r"^### ([A-Z]\d+)\. (.+)$", (DOCS / "contract.md").read_text(), re.MULTILINE)
    contracts = (testing.AdapterContract, testing.StepContract, testing.FusionContract, testing.KernelContract)
    assert headings == [(each.id, each.title) for contract in contracts for each in scenarios_of(contract)]


def test_errors_page_has_every_error():
    """Read from the sources, so that no module can be forgotten."""
    classes = {}
    for folder in ("", "adapters", "registry", "fusion", "engines", "bench", "cli", "testing"):
        for file in (ROOT / folder).glob("**/*.py" if folder else "*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ClassDef):
                    bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
                    classes.setdefault(node.name, set()).update(bases)
    defined = {"LayerfuseError"}
    while more := {name for name, bases in classes.items() if bases & defined} - defined:
        defined |= more
    headings = re.findall(r"^## (\w+Error)$", (DOCS / "errors.md").read_text(), re.MULTILINE)
    assert sorted(headings) == sorted(defined - {"LayerfuseError"})


def test_traps_page_has_all_32_and_names_tests_that_exist():
    text = (DOCS / "traps.md").read_text()
    numbers = [int(number) for number in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)]
    assert numbers == list(range(1, 33))
    files = [*(ROOT / "tests" / "adapters").glob("test_traps*.py"), ROOT / "tests" / "engines" / "test_sglang_specs.py"]
    written = re.findall(r"def (test_trap_\d\d_\w*)", "".join(file.read_text() for file in files))
    for number in range(1, 33):
        assert any(name.startswith(f"test_trap_{number:02d}_") for name in written), f"trap {number} has no test"


def test_site_builds_without_a_warning(tmp_path):
    mkdocs = shutil.which("mkdocs", path=str(Path(sys.executable).parent)) or shutil.which("mkdocs")
    if mkdocs is None:
        pytest.skip("mkdocs is not installed")
    done = _run([mkdocs, "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")], ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    index = (tmp_path / "site" / "index.html").read_text()
    assert not re.findall(r'(?:src|href)="(https?://[^"]+\.(?:js|css|woff2?)[^"]*)"', index)
