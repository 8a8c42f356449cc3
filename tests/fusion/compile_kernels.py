"""Compiles the norm kernels for GPUs that are not here, and prints what came out as JSON. Run by test_triton_targets.

Apart from the tests, as their process interprets kernels and cannot compile them.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile  # noqa: A004

from layerfuse.fusion.backends.triton import tuning
from layerfuse.fusion.backends.triton.kernels import dual_norm, row_norm
from layerfuse.fusion.ops.quantisation import LARGEST

TARGETS = {
    "gfx942": (GPUTarget("hip", "gfx942", 64), torch.float8_e4m3fnuz, "fp8e4b8"),
    "gfx950": (GPUTarget("hip", "gfx950", 64), torch.float8_e4m3fn, "fp8e4nv"),
    "sm90": (GPUTarget("cuda", 90, 32), torch.float8_e4m3fn, "fp8e4nv"),
    "sm100": (GPUTarget("cuda", 100, 32), torch.float8_e4m3fn, "fp8e4nv"),
}
QUANTS = {"plain": (0, 0), "per token": (1, 0), "group": (2, 128)}
FEW, MANY = 0, 6
"""Steps of the tuning."""
_WIDE = r"(?:global|buffer)_load_dwordx4|ld\.global\S*\.v4\.b32"
_ONE_BY_ONE = r"(?:global|buffer)_load_(?:ushort|u16|d16|short_d16)\w*|ld\.global(?!\S*\.v)\S*\.b16"


def dual(name: str, form: str, widths: tuple[int, int], step: int, early: bool = False) -> dict[str, Any]:
    """A dual norm in bfloat16, of column ranges of a projection with 64 columns more."""
    (target, dtype, fp8), (quant, group), (q, kv) = TARGETS[name], QUANTS[form], widths
    unit = min(16, (sum(widths) + 64) & -(sum(widths) + 64))
    launch = tuning.launch_dual(step, tuning.Dual(q, kv, 2, quant != 0, group, unit >= 8), target.warp_size)
    constants = {
        "Q_WIDTH": q, "KV_WIDTH": kv, "Q_EPSILON": 1e-6, "KV_EPSILON": 1e-6, "Q_UNIT": unit, "KV_UNIT": unit,
        "QUANT": quant, "GROUP": group, "LARGEST": LARGEST[dtype] if quant else 0.0, "UE8M0": False,
        "Q_CHUNK": launch.chunk, "Q_TAIL": launch.tail, "KV_CHUNK": launch.kv_chunk, "ROWS": launch.rows,
        "SPLIT": launch.split, "HOLD": launch.hold, "EARLY": early,
    }  # fmt: skip
    types = dict.fromkeys(("q", "kv", "q_weight", "kv_weight", "kv_out"), "*bf16")
    types |= {"q_out": f"*{fp8}" if quant else "*bf16", "scales": "*fp32" if quant else "*bf16"}
    return built(dual_norm, name, types, constants, launch) | {
        "target": name, "kernel": "dual_norm", "form": form, "widths": widths, "step": step, "early": early,
    }  # fmt: skip


def row(name: str, form: str, width: int, step: int) -> dict[str, Any]:
    """An addition and a norm in bfloat16."""
    (target, dtype, fp8), (quant, group) = TARGETS[name], QUANTS[form]
    launch = tuning.launch_single(step, width, 2, True, target.warp_size)
    constants = {
        "WIDTH": width, "EPSILON": 1e-6, "OFFSET": 1.0, "X_UNIT": 16, "RESIDUAL_UNIT": 16, "ADD": True, "QUANT": quant,
        "GROUP": group, "LARGEST": LARGEST[dtype] if quant else 0.0, "UE8M0": False, "CHUNK": launch.chunk,
        "TAIL": launch.tail, "ROWS": launch.rows, "HOLD": launch.hold, "EARLY": False,
    }  # fmt: skip
    types = dict.fromkeys(("x", "residual", "weight", "residual_out"), "*bf16")
    types |= {"out": f"*{fp8}" if quant else "*bf16", "scales": "*fp32" if quant else "*bf16"}
    return built(row_norm, name, types, constants, launch) | {
        "target": name, "kernel": "row_norm", "form": form, "widths": (width,), "step": step, "early": False,
    }  # fmt: skip


def built(
    kernel: Any, name: str, types: dict[str, str], constants: dict[str, Any], launch: tuning.Launch
) -> dict[str, Any]:
    """What one variant compiles to."""
    aligned = list(types)
    names = kernel.arg_names
    types = {argument: types.get(argument, "constexpr" if argument in constants else "i32") for argument in names}
    source = ASTSource(
        fn=kernel,
        signature=types,
        constexprs={(names.index(argument),): value for argument, value in constants.items()},
        attrs={(names.index(argument),): [["tt.divisibility", 16]] for argument in aligned},
    )
    result = compile(source, target=TARGETS[name][0], options={"num_warps": launch.warps})
    text = result.asm["amdgcn"] if "amdgcn" in result.asm else result.asm["ptx"]
    return {
        "rows": launch.rows, "warps": launch.warps,
        "binary": len(result.asm["hsaco"] if "hsaco" in result.asm else result.asm["cubin"]),
        "wide_loads": len(re.findall(_WIDE, text)),
        "loads_one_by_one": len(re.findall(_ONE_BY_ONE, text)),
        "overlap": "griddepcontrol" in text,
        "spills": sum(int(n) for n in re.findall(r"spill_count:\s+(\d+)", text)),
    }  # fmt: skip


if __name__ == "__main__":
    found = []
    for target in TARGETS:
        found += [dual(target, form, (1536, 512), step) for form in QUANTS for step in (FEW, MANY)]
        found += [dual(target, "plain", (1000, 384), MANY), dual(target, "group", (2304, 512), MANY)]
        found += [row(target, "plain", 7168, MANY), row(target, "plain", 128, MANY), row(target, "group", 7168, FEW)]
    found += [dual("sm90", form, (1536, 512), FEW, early=True) for form in QUANTS]
    found.append(dual("sm90", "plain", (1001, 333), MANY))
    json.dump(found, sys.stdout)
