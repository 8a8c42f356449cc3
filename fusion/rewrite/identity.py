"""The key of a plan's rewriting for caches of compiled graphs."""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

from .. import backends
from ..alike import Alike
from ..chain import Fusion
from ..compose import Reference
from ..planning import Plan


@cache
def source_hash() -> str:
    """A hash of this library's planning, matching, rewriting, ops and backends: what decides which graph comes out."""
    return hash_of(Path(__file__).parent.parent)


def hash_of(folder: Path) -> str:
    """A hash of the Python files in a folder, and in those below it."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def key_of(plan: Plan) -> str:
    """A key for what is rewritten by a plan: the source, the plan, and the backend that is forced.

    What the ranks of a group find out together is not in it (`ranks.kernels_here`).
    """
    return f"layerfuse-{source_hash()}-{plan_hash(plan)}-{backends.forced()}"


def plan_hash(plan: Plan) -> str:
    """A hash of everything in a plan that rewriting may act on: specs, decisions, target, config, other packages' fusions.

    The rank is left out, and how many experts it has: the ranks of a tensor-parallel group compile one graph, and may share its cache.
    """
    from ..catalog import FUSIONS

    alike = Alike(without=("rank", "num_local_experts"))
    specs = [(layer, alike.number(spec)) for layer, spec in plan.specs]
    foreign = [_meaning_of(fusion) for fusion in FUSIONS.values() if fusion.owner != "layerfuse"]
    config = plan.config.to_dict()
    del config["strict"]  # which decides what is an error, and nothing in a graph
    engine = None if plan.engine is None else plan.engine.to_dict()
    held = json.dumps([plan.target.to_dict(), config, engine, list(FUSIONS), foreign], sort_keys=True, default=repr)
    return hashlib.sha256(f"{held} {specs} {plan.decisions} {alike.said}".encode()).hexdigest()


def _meaning_of(fusion: Fusion) -> str:
    """What a fusion of another package computes and where it is found: its chain, and the code of its steps and of its reference."""
    code: list[Any] = [] if isinstance(fusion.op.reference, Reference) else [fusion.op.reference]
    for step in fusion.chain:
        code += [*type(step).__mro__, *step.reference().values()]
    if fusion.format is not None:
        code.append(fusion.format.function)
    modules = {module.__name__ for each in code if (module := inspect.getmodule(each)) is not None}
    return f"{fusion.op.schema} {fusion.chain!r} {sorted(filter(None, map(_code_of, modules)))}"


@cache
def _code_of(module: str) -> str | None:
    """A hash of the package that another package's module is of: a step may call what stands beside it.

    `source_hash` has ours; Python's own and torch's are in every key.
    """
    top = module.partition(".")[0]
    if top in (__name__.partition(".")[0], "torch", *sys.stdlib_module_names):
        return None
    whole = sys.modules.get(top) or sys.modules.get(module)
    if whole is None:
        return None
    folders = whole.__spec__ and whole.__spec__.submodule_search_locations
    if folders:
        return " ".join(hash_of(Path(folder)) for folder in folders)
    try:
        file = inspect.getsourcefile(whole)
    except TypeError:  # made by hand
        return None
    return None if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()
