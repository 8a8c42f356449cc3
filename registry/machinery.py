"""Names that other machinery asks of a model, where they follow from its specs as transformers builds it.

vLLM wants to know which linears of a checkpoint it merges (`packed_modules_mapping`), transformers which modules of one parent a kernel takes
together (`KernelConfig`, transformers#46339). Specs say which linears read the same tensor, and what reads each norm.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from ..adapters.specs import LinearSpec, NormSpec, ResidualSpec

FusionKey: TypeAlias = tuple[tuple[str, str], ...]
"""What `KernelConfig` takes: what each module is, and its path with `*` for the number of a layer."""

MERGED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
"""vLLM's names of merged linears, and the parts in the order of its models."""


def packed_modules(specs: Iterable[tuple[str, Any]]) -> dict[str, list[str]]:
    """The `packed_modules_mapping` of vLLM: merged linear -> those of the checkpoint. One that the checkpoint has merged already is its own part.

    Args:
        specs: of a model that transformers built, (path, spec), as `specs_in` gives them. Linears that no norm's spec names are not there.
    """
    found: dict[str, list[str]] = {}
    for linear in _linears(specs):
        together = {path.rpartition(".")[2] for path in (linear.path, *linear.shares_input)}
        for merged, parts in MERGED.items():
            if together >= set(parts):
                found[merged] = list(parts)
            elif merged in together:
                found.setdefault(merged, [merged])
    return {merged: found[merged] for merged in MERGED if merged in found}


def kernel_fusions(specs: Iterable[tuple[str, Any]]) -> list[FusionKey]:
    """The keys under which transformers' `KernelConfig` takes a kernel for a norm and the module that alone reads it.

    Only pairs that stand in each decoder layer of their list are given: `KernelConfig` refuses others.

    Args:
        specs: as for `packed_modules`.
    """
    layers: Counter[str] = Counter()
    pairs: Counter[FusionKey] = Counter()
    for path, spec in specs:
        if isinstance(spec, ResidualSpec):
            parent = re.sub(r"\.\d+(?=\.|$)", ".*", path)
            layers[parent] += 1
            read = [(norm, "Attention") for norm in spec.input_norms]
            for norm, what in [*read, *((norm, "MLP") for norm in spec.post_attention_norms)]:
                readers = _readers(norm, spec if what == "MLP" else None)
                if norm.module is not None and "." not in norm.module and len(readers) == 1:
                    pairs[("RMSNorm", f"{parent}.{norm.module}"), (what, f"{parent}.{readers.pop()}")] += 1
    return [key for key, times in pairs.items() if times == layers[key[0][1].rpartition(".")[0]]]


def _readers(norm: NormSpec, residual: ResidualSpec | None) -> set[str]:
    """The modules of the decoder layer that read a norm, as far as specs say."""
    readers = {linear.path.partition(".")[0] for linear in norm.consumers}
    if residual is not None and residual.experts is not None and residual.experts.path is not None:
        readers.add(residual.experts.path.partition(".")[0])
    return readers


def _linears(specs: Iterable[tuple[str, Any]]) -> Iterator[LinearSpec]:
    for _, spec in specs:
        if isinstance(spec, ResidualSpec):
            for norm in (*spec.input_norms, *spec.post_attention_norms):
                yield from norm.consumers
