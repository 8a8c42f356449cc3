"""What vLLM's cache of compiled models knows layerfuse by: all that decides what is in a graph, and nothing else.

vLLM hashes its config when a module is called first. The key stands in the place of layerfuse's options while it does, so that a start
in which layerfuse did not come that far has another key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from vllm.distributed import parallel_state
from vllm.platforms import current_platform

from ...fusion.rewrite.identity import hash_of, key_of
from ...fusion.rewrite.ranks import kernels_here
from ..compiled_module import CompiledModule
from ..options import KEY, OWN
from . import products
from .passes import tensor_parallel_group, why_not_now


def key_for(compiled: CompiledModule) -> str:
    """The key of one module. Where the ranks of a group decide together, all of them make this call.

    It holds the plan, why nothing of it is done or no product is layerfuse's, the source, torch's release, the forced backend, whether the GPUs have kernels for fused
    all-reduces, who manages vLLM's passes, for which numbers of tokens nothing is rewritten, and the layers of `mla_decode`; and what is left unread on purpose, as the report that is
    kept names the norms of all else.
    """
    said = [key_of(compiled.plan), _own_source(), torch.__version__, str(current_platform.get_pass_manager_cls())]
    said.append(f"{why_not_now(compiled.plan)}, {products.why_not()}")
    said += [str(sorted(compiled.around.ignored)), str(compiled.untouched)]
    if parallel_state.model_parallel_is_initialized():
        dtype = compiled.config.model_config.dtype
        said += kernels_here(compiled.plan, tensor_parallel_group(), dtype, compiled.device)
    said += [each.key for each in compiled.placements.values()]
    return hashlib.sha256("\n".join(said).encode()).hexdigest()


@cache
def _own_source() -> str:
    return hash_of(Path(__file__).parents[1])


def check_table(vllm_config: Any) -> None:
    """Check that vLLM's config can be told of a key.

    Raises:
        TypeError: `additional_config` is none of vLLM's tables, but an object with a hash of its own.
    """
    given = vllm_config.additional_config
    if not isinstance(given, dict):
        raise TypeError(
            f"additional_config is {type(given).__name__}: a table is needed to tell vLLM's cache of the fusions"
        )


@contextmanager
def in_place_of_options(compiled: CompiledModule) -> Iterator[None]:
    """Let vLLM's config hold the compiled module's key in the place of layerfuse's options, which decide nothing beside it.

    A compiled without a key leaves the cache to vLLM alone: neither options nor key are there.
    """
    config = compiled.config
    given = config.additional_config
    others = {name: value for name, value in given.items() if name != KEY}
    config.additional_config = {**others, KEY: {OWN: compiled.key}} if compiled.key else others
    try:
        yield
    finally:
        config.additional_config = given
