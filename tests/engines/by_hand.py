"""What vLLM's uncompiled models do by hand, read off their source without importing it, and how it differs from what was recorded.

    python by_hand.py SITE-PACKAGES/vllm            what is other than in tests/data/vllm_by_hand.json; the exit code is 1 where something is
    python by_hand.py SITE-PACKAGES/vllm --write    record it

Run it for each new release. A line names a module, and an architecture, a function that it calls, or a `forward` or such a function that is
there now, is gone, or is other code: there the facts of `adapters/` and the rows of `native_fusions.CODE` are to be read again.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

RECORD = Path(__file__).parents[1] / "data" / "vllm_by_hand.json"
LIST = "DEFAULT_BREAKABLE_CUDAGRAPH_ARCHITECTURES"
_OTHERS = {"amd", "xpu", "cpu", "third_party"}
"""Folders of other platforms."""

Read: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Module -> its architectures, the functions that it calls, and the code of its forwards and of those functions: place -> digest."""


def listed(vllm: Path) -> list[str]:
    """The architectures that it does not compile; none in a release that names none."""
    for node in ast.walk(ast.parse((vllm / "config" / "vllm.py").read_text())):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and ast.unparse(node.targets[0]) == LIST:
            return sorted(ast.literal_eval(node.value.args[0]))
    return []


def files_of(vllm: Path) -> dict[str, str]:
    """Architecture -> its module, as the registry has it."""
    found: dict[str, str] = {}
    for node in ast.parse((vllm / "model_executor" / "models" / "registry.py").read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            for key, value in zip(node.value.keys, node.value.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(value, ast.Tuple) and len(value.elts) == 2:
                    found[key.value] = ast.literal_eval(value)[0]
    return found


def sources(vllm: Path, module: str) -> Iterator[tuple[str, ast.Module]]:
    """The files of an architecture, by their place below vLLM, but for those of other platforms."""
    place = (
        vllm.joinpath(*module.split(".")[1:]) if module.startswith("vllm.") else vllm / "model_executor/models" / module
    )
    for file in sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]:
        below = file.relative_to(vllm)
        if not _OTHERS & {*below.parts}:
            yield below.as_posix(), ast.parse(file.read_text())


def calls(tree: ast.Module) -> set[str]:
    """The functions that are called in a file, but for methods of the instance, by their names."""
    return {
        str(getattr(node.func, "id", getattr(node.func, "attr", "")))
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and "self" not in {each.id for each in ast.walk(node.func) if isinstance(each, ast.Name)}
    }


def by_hand(trees: list[ast.Module]) -> list[str]:
    """Of those the ones that fuse something."""
    return sorted(
        name
        for name in set().union(*map(calls, trees))
        if name.startswith(("fused_", "maybe_fused")) and "_moe_" not in name
    )


def _digest(node: ast.FunctionDef) -> str:
    return hashlib.sha256(ast.dump(node).encode()).hexdigest()[:12]


def _forwards(file: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    for cls in ast.walk(tree):
        for node in cls.body if isinstance(cls, ast.ClassDef) else ():
            if isinstance(node, ast.FunctionDef) and "forward" in node.name:
                yield f"{file}:{cls.name}.{node.name}", _digest(node)


def _imported(vllm: Path, tree: ast.Module, names: list[str]) -> Iterator[tuple[str, str]]:
    """The functions of these names that a file has from elsewhere in vLLM."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and str(node.module).startswith("vllm."):
            file = vllm.joinpath(*str(node.module).split(".")[1:]).with_suffix(".py")
            wanted = {alias.name for alias in node.names}.intersection(names)
            for each in ast.parse(file.read_text()).body if wanted and file.exists() else ():
                if isinstance(each, ast.FunctionDef) and each.name in wanted:
                    yield f"{file.relative_to(vllm).as_posix()}:{each.name}", _digest(each)


def read(vllm: Path) -> Read:
    """What the models of a vLLM do by hand."""
    files, found = files_of(vllm), dict[str, dict[str, Any]]()
    for name in listed(vllm):
        if name not in files:
            continue  # another name of one that is there
        module = found.setdefault(files[name], {"architectures": []})
        module["architectures"].append(name)
        if "calls" not in module:
            placed = list(sources(vllm, files[name]))
            module["calls"] = by_hand([tree for _, tree in placed])
            several = [each for file, tree in placed for each in _forwards(file, tree)]
            several += [each for _, tree in placed for each in _imported(vllm, tree, module["calls"])]
            module["code"] = dict(sorted(several))
    return found


def differences(before: Read, now: Read) -> list[str]:
    """How one is other than the other, a line for each."""
    nothing: Mapping[str, Any] = {"architectures": [], "calls": [], "code": {}}
    lines = []
    for module in sorted({*before, *now}):
        known, found = before.get(module, nothing), now.get(module, nothing)
        for what in nothing:
            lines += [f"{module}: {each} is there now" for each in found[what] if each not in known[what]]
            lines += [f"{module}: {each} is gone" for each in known[what] if each not in found[what]]
        code = known["code"]
        lines += [
            f"{module}: {each} is other code"
            for each in found["code"]
            if code.get(each) not in (None, found["code"][each])
        ]
    return lines


def main(vllm: str, *options: str) -> int:
    """Say what is other, or record what is there."""
    now = read(Path(vllm))
    if "--write" in options:
        RECORD.write_text(json.dumps(now, indent=1) + "\n")
        return 0
    lines = differences(json.loads(RECORD.read_text()), now)
    print("\n".join(lines) or "as recorded")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
