"""The key of a plan's rewriting for caches of compiled graphs."""

from __future__ import annotations

import hashlib
import inspect
import json
from functools import cache
from pathlib import Path
from typing import Any

import attrs

from ..compose import Reference
from ..declare import Op
from ..plan import Plan


@cache
def source_hash() -> str:
    """A hash of this library's planning, matching, rewriting and ops: what decides which graph comes out."""
    fusion = Path(__file__).parent.parent
    digest = hashlib.sha256()
    folders = ("", "catalog", "match", "rewrite", "ops")
    for path in sorted(path for folder in folders for path in (fusion / folder).glob("*.py")):
        digest.update(path.relative_to(fusion).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def plan_hash(plan: Plan) -> str:
    """A hash of everything in a plan that rewriting may act on: specs, decisions, target, config, other packages' fusions.

    The rank is left out: the ranks of a tensor-parallel group compile one graph, and may share its cache.
    """
    from ..catalog import FUSIONS

    specs = [(layer, type(spec).__name__, _without_rank(attrs.asdict(spec))) for layer, spec in plan.specs]
    foreign = [_meaning_of(fusion.op) for fusion in FUSIONS.values() if fusion.owner != "layerfuse"]
    text = json.dumps([plan.to_dict(), specs, list(FUSIONS), foreign], sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()


def _meaning_of(op: Op) -> str:
    """What an op of another package computes: its chain, or a hash of the file that its reference is defined in."""
    if op.chain is not None and isinstance(op.reference, Reference):
        return f"{op.schema} {op.chain!r}"
    path = inspect.getsourcefile(op.reference)
    return "" if path is None else hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _without_rank(fields: dict[str, Any]) -> dict[str, Any]:
    if "parallel" in fields:
        fields["parallel"] = {"size": fields["parallel"]["size"]}
    return fields
