"""Compiles the dual-norm kernel for GPUs that are not here, and prints what came out as JSON. Run by test_triton_targets.

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
from layerfuse.fusion.backends.triton.kernels import dual_norm
from layerfuse.fusion.ops.quantisation import LARGEST

TARGETS = {
    "gfx942": (GPUTarget("hip", "gfx942", 64), torch.float8_e4m3fnuz, "fp8e4b8"),
    "gfx950": (GPUTarget("hip", "gfx950", 64), torch.float8_e4m3fn, "fp8e4nv"),
    "sm90": (GPUTarget("cuda", 90, 32), torch.float8_e4m3fn, "fp8e4nv"),
}
QUANTS = {"plain": (0, 0), "per token": (1, 0), "group": (2, 128)}


def built(name: str, form: str, step: int, early: bool) -> dict[str, Any]:
    """One variant, for DeepSeek-V3's widths in bfloat16."""
    target, dtype, fp8 = TARGETS[name]
    quant, group = QUANTS[form]
    launch = tuning.launch_for(step, 1536, 512, group or None, quant != 0, target.warp_size)
    constants = {
        "Q_WIDTH": 1536, "KV_WIDTH": 512, "Q_EPSILON": 1e-6, "KV_EPSILON": 1e-6, "QUANT": quant, "GROUP": group,
        "LARGEST": LARGEST[dtype] if quant else 0.0, "UE8M0": False, "Q_CHUNK": launch.q_chunk,
        "KV_CHUNK": launch.kv_chunk, "SPLIT": launch.split, "EARLY": early,
    }  # fmt: skip
    types = dict.fromkeys(("q", "kv", "q_weight", "kv_weight", "kv_out"), "*bf16")
    types |= {"q_out": f"*{fp8}" if quant else "*bf16", "scales": "*fp32" if quant else "*bf16"}
    aligned = [*types, "q_stride", "kv_stride"]
    types |= dict.fromkeys(("q_stride", "kv_stride", "scale_stride", "group_stride"), "i32")
    types |= dict.fromkeys(constants, "constexpr")
    names = dual_norm.arg_names
    source = ASTSource(
        fn=dual_norm,
        signature={argument: types[argument] for argument in names},
        constexprs={(names.index(argument),): value for argument, value in constants.items()},
        attrs={(names.index(argument),): [["tt.divisibility", 16]] for argument in aligned},
    )
    kernel = compile(source, target=target, options={"num_warps": launch.warps})
    text = kernel.asm["amdgcn"] if "amdgcn" in kernel.asm else kernel.asm["ptx"]
    return {
        "target": name, "form": form, "step": step, "early": early, "warps": launch.warps,
        "binary": len(kernel.asm["hsaco"] if "hsaco" in kernel.asm else kernel.asm["cubin"]),
        "wide_loads": len(re.findall(r"(?:global|buffer)_load_dwordx4|ld\.global\S*\.v4\.b32", text)),
        "overlap": "griddepcontrol" in text,
        "spills": sum(int(n) for n in re.findall(r"spill_count:\s+(\d+)", text)),
    }  # fmt: skip


if __name__ == "__main__":
    steps = {"plain": (0, 1, 2), "per token": (0, 3), "group": (0, 3)}
    cases = [(name, form, step, False) for name in TARGETS for form in QUANTS for step in steps[form]]
    cases += [("sm90", form, 0, True) for form in QUANTS]
    json.dump([built(*case) for case in cases], sys.stdout)
