"""What pyproject.toml cannot say: a wheel and an sdist hold the commit that they were built from, where it is known, and a wheel the models as JSON."""

import json
import runpy
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parent
COMMIT = runpy.run_path(str(ROOT / "_version.py"))


def write_commit(folder: Path) -> None:
    """Write the file that `layerfuse --version` reads."""
    commit = COMMIT["commit_of"](ROOT)
    if commit is not None:
        (folder / COMMIT["FILE"]).write_text(f"{commit}\n", encoding="utf-8")


class BuildWithCommit(build_py):
    """The package without this file, which lies in its folder, and with its commit."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:  # noqa: D102
        return [found for found in super().find_package_modules(package, package_dir) if found[1] != "setup"]

    def run(self) -> None:  # noqa: D102
        super().run()
        if not self.editable_mode:
            package = Path(self.build_lib) / "layerfuse"
            write_commit(package)
            # Read each time that a model is asked for (registry/entries.py), where TOML would take 40 ms.
            models = tomllib.loads((ROOT / "models.toml").read_text(encoding="utf-8"))
            (package / "models.json").write_text(json.dumps(models), encoding="utf-8")


class SdistWithCommit(sdist):
    """The sources, and their commit."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:  # noqa: D102
        super().make_release_tree(base_dir, files)
        write_commit(Path(base_dir))


if __name__ == "__main__":
    setup(cmdclass={"build_py": BuildWithCommit, "sdist": SdistWithCommit})
