"""Our table of buffer sizes and native head counts beside AITER's own Python functions.

LAYERFUSE_AITER_CHECKOUT names a git checkout of ROCm/aiter (bare or not) with its tags, or a folder with one source tree per release.
Functions are cut out of its files and run alone, the questions that they ask of the GPU answered here.
"""

from __future__ import annotations

import ast
import functools
import itertools
import math
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from layerfuse.fusion.metadata import native, sizes

VARIABLE = "LAYERFUSE_AITER_CHECKOUT"
BF16, FP8 = "bf16", "fp8"
CU_COUNT = {"gfx942": 304, "gfx950": 256}
BATCHES = (1, 3, 64, 300, 512)


def source(checkout: Path, release: str, file: str) -> str | None:
    """A file of a release, or None where the checkout has no such release or file."""
    if (checkout / release).is_dir():
        path = checkout / release / file
        return path.read_text() if path.is_file() else None
    done = subprocess.run(
        ["git", "-C", str(checkout), "show", f"{release}:{file}"], capture_output=True, text=True, check=False
    )
    return done.stdout if done.returncode == 0 else None


class Device:
    """What AITER's functions ask: the architecture, the compute units, the switch."""

    arch = "gfx942"
    experimental = False

    @property
    def cu_count(self) -> int:
        """Compute units."""
        return CU_COUNT[self.arch]


def functions(text: str, device: Device) -> dict[str, Callable[..., Any]]:
    """The size functions of `aiter/ops/attention.py`, run without the rest of AITER."""
    wanted = {
        "get_mla_metadata_info_v1",
        "get_ps_metadata_info_v1",
        "get_mla_decode_fwd_max_splits",
        "get_mla_decode_fwd_occupancy",
    }
    nodes = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name in wanted]
    for node in nodes:
        node.decorator_list, node.returns = [], None
        for argument in node.args.args:
            argument.annotation = None
    properties = SimpleNamespace()
    cuda = SimpleNamespace(
        current_device=lambda: 0,
        get_device_properties=lambda _: SimpleNamespace(multi_processor_count=device.cu_count, **vars(properties)),
    )
    names: dict[str, Any] = {
        "math": math,
        "functools": functools,
        "torch": SimpleNamespace(cuda=cuda, int32="int32", uint64="uint64"),
        "dtypes": SimpleNamespace(fp8=FP8, bf16=BF16),
        "get_gfx": lambda: device.arch,
        "get_cu_num": lambda: device.cu_count,
        "is_experimental_enabled": lambda: device.experimental,
    }
    exec(compile(ast.Module(nodes, []), "aiter/ops/attention.py", "exec"), names)
    return {name: names[name] for name in wanted if name in names}


def native_condition(text: str, device: Device) -> Callable[..., bool]:
    """The condition under which `mla_decode_fwd` takes heads as they are, as a function of its own."""
    (decode,) = (
        node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == "mla_decode_fwd"
    )
    (test,) = (
        node.test
        for node in ast.walk(decode)
        if isinstance(node, ast.If)
        and any(isinstance(part, ast.Compare) and ast.unparse(part) == "nhead == 16" for part in ast.walk(node.test))
        and len(node.orelse) == 1
        and isinstance(node.orelse[0], ast.If)
        and "range(32" in ast.unparse(node.orelse[0].test)
    )
    code = compile(ast.Expression(test), "aiter/mla.py", "eval")
    names = {
        "dtypes": SimpleNamespace(fp8=FP8, bf16=BF16),
        "get_gfx": lambda: device.arch,
        "get_fp8_e4m3_dtype": lambda: FP8,
        "is_experimental_enabled": lambda: device.experimental,
    }

    def holds(heads: int, queries: int, q: str, kv: str) -> bool:
        call = {
            "nhead": heads,
            "max_seqlen_q": queries,
            "q": SimpleNamespace(dtype=q),
            "kv_buffer": SimpleNamespace(dtype=kv),
        }
        return bool(eval(code, names, call))

    return holds


def cases() -> Iterator[sizes.Case]:
    """The grid, for both architectures."""
    dtypes, heads = ((BF16, BF16), (BF16, FP8), (FP8, FP8)), range(8, 129, 8)
    grid = itertools.product(CU_COUNT, dtypes, range(1, 9), heads, BATCHES, (False, True), (False, True))
    for i, (arch, (q, kv), queries, count, batch, sparse, fast) in enumerate(grid):
        intra = i % 7 == 3
        yield sizes.Case(
            batch=batch,
            queries=queries,
            heads=count,
            q=q,
            kv=kv,
            arch=arch,
            cu_count=CU_COUNT[arch],
            sparse=sparse,
            fast=fast,
            intra_batch=intra,
            num_kv_splits=16 if intra and i % 2 else 32,
            max_split_per_batch=(1, 4, 16)[i % 3] if i % 5 == 2 else -1,
            experimental=i % 4 == 1,
        )


def plain(answer: Any) -> dict[str, tuple[int, ...]]:
    """AITER's answer in our words; the dtypes must be ours too."""
    found = {}
    for name, (shape, dtype) in zip(sizes.BUFFERS, answer, strict=True):
        if dtype != sizes.BUFFER_DTYPE[name]:
            raise TypeError(f"{name} is {dtype}")
        found[name] = (shape,) if isinstance(shape, int) else tuple(shape)
    return found


def compare(checkout: Path, release: str) -> dict[str, Any]:
    """Points compared and those that differ, of one release; empty where the checkout does not have it."""
    text = source(checkout, release, "aiter/ops/attention.py")
    if text is None or "def get_mla_metadata_info_v1" not in text:
        return {}
    device = Device()
    theirs = functions(text, device)
    takes = native_condition(source(checkout, release, "aiter/mla.py") or "", device)
    counts = {"decode": 0, "prefill": 0, "native": 0}
    mismatches: list[str] = []

    def differ(kind: str, expected: Any, found: Any, what: Any) -> None:
        counts[kind] += 1
        if expected != found:
            mismatches.append(f"{kind}: {what}: AITER {expected}, here {found}")

    for case in cases():
        device.arch, device.experimental = case.arch, case.experimental
        options: dict[str, Any] = {}
        if case.intra_batch:
            options |= {"intra_batch_mode": True, "num_kv_splits": case.num_kv_splits}
        if case.max_split_per_batch > 0:
            options["max_split_per_batch"] = case.max_split_per_batch
        answer = theirs["get_mla_metadata_info_v1"](
            case.batch, case.queries, case.heads, case.q, case.kv, case.sparse, case.fast, **options
        )
        differ("decode", plain(answer), sizes.metadata_shapes(case, release), case)
        if not case.experimental:
            found = native.is_native(case.heads, case.queries, case.arch, case.q, case.kv, release)
            differ("native", takes(case.heads, case.queries, case.q, case.kv), found, case)
    if "get_ps_metadata_info_v1" in theirs:
        for arch, heads, queries, batch, grain in itertools.product(
            CU_COUNT, (1, 2, 3, 8, 16, 128), (1, 255, 256, 4096, 100_000), BATCHES, (64, 256)
        ):
            device.arch = arch
            answer = plain(theirs["get_ps_metadata_info_v1"](batch, heads, queries, grain))
            found = sizes.ps_metadata_shapes(batch, heads, queries, grain, device.cu_count)
            differ("prefill", answer, found, (arch, batch, heads, queries, grain))
    return {"points": counts, "mismatches": len(mismatches), "first": mismatches[:5]}
