"""Writes the package that adding-a-fusion.md shows, to begin a package of fusions with: `python docs/template.py FOLDER`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

PAGE = Path(__file__).with_name("adding-a-fusion.md")
FILE = re.compile(r'^```\w+ title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def write(folder: Path) -> list[Path]:
    """Write every file of the page into a folder that does not exist yet, and return them."""
    folder.mkdir(parents=True)
    files = [(folder / name, text) for name, text in FILE.findall(PAGE.read_text(encoding="utf-8"))]
    for path, text in files:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return [path for path, _ in files]


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    try:
        print(*write(Path(sys.argv[1])), sep="\n")
    except OSError as error:
        sys.exit(f"{error.filename}: {error.strerror}")
