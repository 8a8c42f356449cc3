"""Where layerfuse stands in vLLM and what would happen there, read from vLLM's source without importing it: for the doctor."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

from ...fusion.backends import BackendError
from ...fusion.config import FusionConfigError
from ..defaults import in_words, with_block_linears
from ..hooks import check_source
from ..mla import NAME
from ..options import BACKEND, Options, check_backend
from .decode_facts import SEAM
from .hooks import HOOKS, PRODUCTS
from .host import VLLM
from .seams import SEAMS
from .switches import BATCH_INVARIANT, BLOCK_LINEARS, INVARIANT, block_switch, is_set


def places(folder: Path) -> Iterator[tuple[str, str, str | None]]:
    """Every hook, then every class and function that a fused op can stand in, once: its name, what is done there, and what is not as expected.

    Args:
        folder: of the package vllm.
    """
    for hook in HOOKS:
        yield hook.place, hook.does, check_source(hook, folder)
    for key in dict.fromkeys(seam.key for seam in SEAMS):
        several = [seam for seam in SEAMS if seam.key == key and not seam.reduces]
        does = f"{', '.join(seam.fusion for seam in several)}: there in models that vLLM does not compile"
        hooks = (hook for seam in several for hook in (seam.hook, seam.function) if hook is not None)
        yield ":".join(key), does, next(filter(None, (check_source(hook, folder) for hook in hooks)), None)
    for function in dict.fromkeys(seam.function for seam in SEAMS if seam.reduces and seam.function is not None):
        several = [seam for seam in SEAMS if seam.function == function]
        does = f"{', '.join(seam.fusion for seam in several)}: there in models that vLLM does not compile and whose norms are given to it"
        yield function.place, does, check_source(function, folder)
    for consumer in dict.fromkeys(seam.consumer for seam in SEAMS if seam.consumer is not None):
        yield (
            consumer.hook.place,
            "linears take there what such a norm has quantised",
            check_source(consumer.hook, folder),
        )
    problems = (check_source(hook, folder) for hook in SEAM.hooks)
    yield SEAM.hook.place, f"{NAME} stands there, compiled or not", next(filter(None, problems), None)
    yield from ((hook.place, hook.does, check_source(hook, folder)) for hook in PRODUCTS)


def inside(version: str, folder: Path) -> tuple[Literal["found", "absent", "broken"], str]:
    """Whether layerfuse would work inside of this vLLM, and a sentence.

    Args:
        version: of vLLM.
        folder: of the package vllm.
    """
    problems = [p for hook in HOOKS if hook.needed and (p := check_source(hook, folder)) is not None]
    if problems:
        return "broken", f"vLLM {version} would be left alone (tested with {', '.join(VLLM.tested)}): {problems[0]}"
    known = (
        "tested" if version in VLLM.tested else f"not tested ({', '.join(VLLM.tested)} are), and has what is expected"
    )
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "layerfuse" not in allowed.split(","):
        return "absent", f"VLLM_PLUGINS={allowed} keeps vLLM from loading it"
    asked = os.environ.get("LAYERFUSE_FUSIONS", "").strip()
    wrong = f"vLLM {version} would not start with"
    try:  # the doctor says more of the variables themselves
        (options := Options()).config()
        with suppress(ImportError):  # without torch there is no backend to know
            if not options.off:
                check_backend()
    except FusionConfigError:
        return "broken", f"{wrong} LAYERFUSE_FUSIONS={asked}, which is refused (below)"
    except BackendError:
        return "broken", f"{wrong} {BACKEND}={os.environ[BACKEND]}, which no op has (below)"
    if is_set(BATCH_INVARIANT):
        return "absent", f"every fusion is left to vLLM {version}: {INVARIANT}"
    would = f"LAYERFUSE_FUSIONS={asked} decides" if asked else in_words("vllm", version) or "no fusion is on by default"
    if not asked and (switch := block_switch()) is not None:
        timed = with_block_linears("vllm", BLOCK_LINEARS[switch])
        would += f"; {switch}=0 gives linears in fp8 blocks to {BLOCK_LINEARS[switch]}, beside which quantised groups were {timed}"
    needed = sum(hook.needed for hook in HOOKS)
    return "found", f"vLLM {version} is {known}; {needed} of {needed} hooks found; {would}"
