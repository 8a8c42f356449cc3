"""The fenced code blocks of a page, and how the Python ones are run: in order, in one namespace, output captured.

As a script: `doc_blocks.py PAGE` runs a page in the current folder and prints the outputs as JSON.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parents[2] / "docs"
FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    language: str
    title: str | None
    code: str
    start: int
    end: int


def blocks_of(text):
    return [Block(m[1], m[2], m[3], m.start(3), m.end(3)) for m in FENCE.finditer(text)]


def expected_outputs(blocks):
    """(Python block, the text block that shows its output or None)."""
    found = []
    for i, block in enumerate(blocks):
        if block.language == "python" and not block.title:
            following = blocks[i + 1] if i + 1 < len(blocks) else None
            found.append((block, following if following and following.language == "text" else None))
    return found


def pretend_installed(pyproject):
    """Put the current folder on the path, with the metadata that installing a package there would have left."""
    project = tomllib.loads(pyproject)["project"]
    info = Path(f"{project['name'].replace('-', '_')}-{project['version']}.dist-info")
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = project["entry-points"]
    (info / "entry_points.txt").write_text(
        "".join(f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items()) for group, points in groups.items())
    )
    sys.path.insert(0, str(Path.cwd()))


def run_page(path):
    """Every Python block's output, in order. Titled TOML blocks are files in the current folder."""
    blocks = blocks_of(path.read_text())
    namespace = {"__name__": "__docs__"}
    outputs = []
    for block in blocks:
        if block.title:
            Path(block.title).write_text(block.code)
            if block.title == "pyproject.toml":
                pretend_installed(block.code)
        if block.language != "python" or block.title:
            continue
        line = path.read_text()[: block.start].count("\n")
        captured = io.StringIO()
        with contextlib.redirect_stdout(captured):
            exec(compile("\n" * line + block.code, str(path), "exec"), namespace)
        outputs.append(captured.getvalue())
    return outputs


if __name__ == "__main__":
    print("OUTPUTS " + json.dumps(run_page(Path(sys.argv[1]))))
