"""Compiles the kernel of bench/scripts/few_token_gemm.py for sm90 without such a GPU, and prints what came out as JSON.

Run by test_few_token_gemm, whose own process interprets kernels and cannot compile them.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile  # noqa: A004

sys.path.insert(0, str(Path(__file__).parents[2] / "bench" / "scripts"))

import few_token_gemm
from few_token_gemm_kernel import few_token_mm


def built(tiling: few_token_gemm.Tiling, tokens: int, quantises: bool) -> dict[str, Any]:
    """What one launch compiles to."""
    given = tiling.constants(tokens, quantises)
    options = {name: given.pop(name) for name in ("num_warps", "num_stages")}
    early = given.pop("launch_pdl", False)
    names = few_token_mm.arg_names
    types = dict.fromkeys(names, "constexpr") | dict.fromkeys(names[8:13], "i32")
    types |= {"x": "*bf16" if quantises else "*fp8e4nv", "weight": "*fp8e4nv", "arrived": "*i32", "out": "*bf16"}
    types |= dict.fromkeys(("x_scales", "weight_scales", "parts"), "*fp32")
    types["weight_boxes"] = f"tensordesc<fp8e4nv[{tiling.columns},128]>" if given["BOXES"] else "*fp8e4nv"
    source = ASTSource(
        fn=few_token_mm,
        signature=types,
        constexprs={(names.index(name),): value for name, value in given.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in (0, 1, 2, 4, 5, 6, 7, 9, 10)},
    )
    result = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    text = result.asm["ptx"]
    before, waits, after = text.partition("griddepcontrol.wait")
    return {
        "tiling": str(tiling), "way": tiling.way, "tokens": tokens, "shared": result.metadata.shared, "early": early,
        "waits": bool(waits), "products": sorted(set(re.findall(r"wgmma\.mma_async\S+", text))),
        "fetches": len(re.findall(r"cp\.async\.bulk\.prefetch", before)),
        "reads": len(re.findall(r"ld\.global|cp\.async\.c[ag]|bulk\.tensor", before if waits else "")),
        "boxes": len(re.findall(r"cp\.async\.bulk\.tensor", after)),
    }  # fmt: skip


if __name__ == "__main__":
    ways = [tiling for tiling in few_token_gemm.tilings(7168, 2048) if tiling.columns == 64 and tiling.stages == 5]
    found = [built(tiling, 16, quantises=place % 2 == 1) for place, tiling in enumerate(ways)]
    found += [built(few_token_gemm.tilings(4608, 7168)[-2], 64, quantises=True)]
    json.dump(found, sys.stdout)
