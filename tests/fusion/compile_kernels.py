"""Compiles the norm kernels for GPUs that are not here, and prints what came out as JSON. Run by test_triton_targets.

Apart from the tests, as their process interprets kernels and cannot compile them. Each op is called as always, with tensors
without memory; only the last step, the launch, compiles for another target instead.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from functools import partial
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile  # noqa: A004

from layerfuse.fusion.backends.symm_mem import launch as symm_mem
from layerfuse.fusion.backends.triton import family, launcher, tuning
from layerfuse.fusion.catalog import FUSIONS
from layerfuse.fusion.compose import op_of
from layerfuse.fusion.declare import GroupName, Op
from layerfuse.fusion.kernel_source import imported
from layerfuse.fusion.steps import AllReduce

TARGETS = {
    "gfx942": (GPUTarget("hip", "gfx942", 64), torch.float8_e4m3fnuz),
    "gfx950": (GPUTarget("hip", "gfx950", 64), torch.float8_e4m3fn),
    "sm90": (GPUTarget("cuda", 90, 32), torch.float8_e4m3fn),
    "sm100": (GPUTarget("cuda", 100, 32), torch.float8_e4m3fn),
}
OLD = {"sm75": (GPUTarget("cuda", 75, 32), torch.float8_e4m3fn)}
"""Without fp8, and without bfloat16 of its own."""
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e4m3fnuz: "*fp8e4b8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_FEW = r"setp\.gt\.s32\s+%p\d+, %r\d+, (\d+);"
"""How a number of rows is compared with few of them."""
TOKENS = 8
FEW, SOME, MANY = 0, 1, 6
"""Steps of the tuning."""
_WIDE = r"(?:global|buffer)_load_dwordx4|ld\.global\S*\.v4\.b32"
_ONE_BY_ONE = r"(?:global|buffer)_load_(?:ushort|u16|d16|short_d16)\w*|ld\.global(?!\S*\.v)\S*\.b16"
_ROUNDED, _WIDENED = r"cvt\.rn\.bf16\.f32\s+(%rs\d+)", r"cvt\.f32\.bf16\s+%\w+, (%rs\d+)"
_PUSH, _LOOK = r"st\.global\.v4\.b32", r"ld\.volatile\.global\.v4\.b32"
READ_AHEAD = ("add_rms_norm_group_quant", "rms_norm_group_quant")
"""Ops whose loads are all in front of the first sum."""
FORMS = {form.op.name: form.op for fusion in FUSIONS.values() for form in fusion.forms if form.op.chain is not None}


class Compiler:
    """Takes the place of `launcher.first`."""

    def __init__(self, name: str, early: bool) -> None:
        self.target, self.early = (TARGETS | OLD)[name][0], early
        self.built: dict[str, Any] = {}

    def __call__(
        self,
        kernel: Any,
        key: tuple[Any, ...],
        tensors: tuple[torch.Tensor, ...],
        numbers: tuple[int, ...],
        constants: tuple[Any, ...],
        *,
        rows: int,
        sides: int,
        warps: int,
        beside: int = 0,
        registers: int = 0,
    ) -> None:
        names, known = kernel.arg_names, len(tensors) + len(numbers)
        types = dict.fromkeys(names, "constexpr")
        types |= {name: TYPES[tensor.dtype] for name, tensor in zip(names, tensors, strict=False)}
        types |= dict.fromkeys(names[len(tensors) : known], "i32")
        source = ASTSource(
            fn=kernel,
            signature=types,
            constexprs={(known + i,): value for i, value in enumerate((*constants, self.early))},
            attrs={(i,): [["tt.divisibility", 16]] for i in range(len(tensors))},
        )
        result = compile(
            source, target=self.target, options={"num_warps": warps} | launcher.limited(registers if self.early else 0)
        )
        text = result.asm["amdgcn"] if "amdgcn" in result.asm else result.asm["ptx"]
        self.built = {
            "op": key[0], "kernel": kernel.__name__, "rows": rows, "warps": warps, "programs": sides,
            "binary": len(result.asm["hsaco"] if "hsaco" in result.asm else result.asm["cubin"]),
            "wide_loads": len(re.findall(_WIDE, text)),
            "loads_one_by_one": len(re.findall(_ONE_BY_ONE, text)),
            "rounded_singly": len({*re.findall(_ROUNDED, text)} & {*re.findall(_WIDENED, text)}),
            "in_pairs": len(re.findall(r"cvt\.rn\.bf16x2\.f32", text)),
            "overlap": re.findall(r"griddepcontrol\.(\w+)", text), "shared": result.metadata.shared,
            "per_token": numbers[0] / TOKENS, "few": [int(n) for n in re.findall(_FEW, text.partition("griddepcontrol")[0])],
            "pushes": len(re.findall(_PUSH, text.partition("ld.volatile")[0])), "looks": len(re.findall(_LOOK, text)),
            **(machine_code(result.asm["cubin"], key[0] in READ_AHEAD) if self.early else {}),
            "spills": sum(int(n) for n in re.findall(r"spill_count:\s+(\d+)", text)),
        }  # fmt: skip


def machine_code(binary: bytes, listed: bool) -> dict[str, int]:
    """What a thread of NVIDIA's holds in registers, what it keeps in memory instead, and, if listed, reads behind the first exchange with others.

    To list the instructions takes as long as half of compiling them.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", *["-sass"] * listed, file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+)", told)
    assert usage
    late = {"late_loads": told.partition("SHFL")[2].count(" LDG.")} if listed else {}
    return {"registers": int(usage[1]), "stack": int(usage[2]), **late}


def built(name: str, op: str, widths: tuple[int, ...], step: int, early: bool = False) -> dict[str, Any]:
    """What one variant compiles to. Rows are column ranges of a projection with 64 columns more."""
    compiler = Compiler(name, early)
    target, dtype = (TARGETS | OLD)[name]
    launcher.first = compiler  # type: ignore[assignment]
    launcher.again = lambda *_: False  # type: ignore[assignment]
    launcher.wave = lambda _: target.warp_size  # type: ignore[assignment]
    tuning.regime = lambda _: step  # type: ignore[assignment]
    declared = FORMS[op]
    of = dict(zip(declared.widths, widths, strict=True))
    args: list[Any] = []
    for argument in declared.args:
        kind = type(argument).__name__
        if kind == "Rows":
            shape = (TOKENS, 32) if argument.heads else (TOKENS,)  # type: ignore[attr-defined]
            width = of[argument.width]  # type: ignore[attr-defined]
            args.append(torch.empty(*shape, sum(widths) + 64, dtype=torch.bfloat16)[..., :width])
        elif kind == "Weight":
            (rows,) = (each for each in declared.rows if each.name == argument.of)  # type: ignore[attr-defined]
            args.append(torch.empty(of[rows.width], dtype=torch.bfloat16))
        elif kind in ("StaticScale", "GlobalScale"):
            args.append(torch.empty(1))
        elif kind == "Table":
            args.append(torch.empty(4096, widths[0])[:, : widths[0] // 2])
        elif kind == "OptionalIndex":
            args.append(torch.zeros(8, dtype=torch.int64))
        elif kind == "QuantDtype":
            args.append(dtype)
        else:
            known = {"Epsilon": 1e-6, "WeightOffset": 1.0, "Limit": 7.0, "PaddedWidth": widths[0] + 192}
            args.append(known.get(kind, argument.default))
    made(declared)(*args)
    return compiler.built | {"target": name, "widths": widths, "step": step, "early": early}


def made(declared: Op, shots: int = 1, resident: int = 132) -> Any:
    """The function of an op; one that starts with an all-reduce is a rank's of four, without its group."""
    own = [kernel.function for fusion in FUSIONS.values() if fusion.op is declared for kernel in fusion.backends]
    if any(own):
        return imported(own[-1])
    if not any(isinstance(step, AllReduce) for step in declared.chain or ()):
        return family.function_of(declared)
    rest = op_of(declared.name, (declared.chain or ())[1:])
    buffers, phases = torch.empty(4, dtype=torch.int64), torch.empty(16, dtype=torch.int32)
    workspace = symm_mem.Workspace(
        symm_mem.Layout(1, 4, shots, 16, 7168 * 2, 2, resident), 16, buffers, phases, phases, None, {}
    )
    function = family.function_of(rest, partial(symm_mem.launch, workspace))
    place = next(place for place, argument in enumerate(declared.args) if isinstance(argument, GroupName))
    return lambda *args: function(*args[:place], *args[place + 1 :])


if __name__ == "__main__":
    found = []
    dual, group = "mla_dual_rms_norm", "mla_dual_rms_norm_group_quant"
    everything = sys.argv[1:] == ["all"]
    for number, target in enumerate(TARGETS):
        for place, (op, declared) in enumerate(FORMS.items()):
            if op.startswith("all_reduce_"):
                if target == "sm90" or (target == "sm100" and not (declared.chain or ())[3:]):  # NVIDIA's alone
                    found.append(built(target, op, (7168,), FEW, early=True))
                continue
            widths = (1536, 512) if len(declared.widths) == 2 else (128,) if declared.rows[0].heads else (7168,)
            # Else each op for a few rows on one target, in turn, and for many on the next; two for many on all, whose loads are looked at.
            for step, turn in ((FEW, place), (MANY, place + 1)):
                if (
                    everything
                    or turn % len(TARGETS) == number
                    or (step == MANY and op in (f"{dual}_per_token_quant", group))
                ):
                    found.append(built(target, op, widths, step))
        found += [built(target, dual, (1000, 384), MANY), built(target, group, (2304, 512), MANY)]
        found.append(built(target, "add_rms_norm", (128,), MANY))
    found += [built("sm90", op, (1536, 512), FEW, early=True) for op in (dual, group)]
    found += [built("sm90", op, (128,), FEW, early=True) for op in ("add_rms_norm", "gated_rms_norm")]
    found += [built("sm90", f"gated_rms_norm_{form}_quant", (128,), FEW, early=True) for form in ("per_token", "group")]
    found += [built("sm90", f"silu_mul_{form}_quant", (2048,), FEW, early=True) for form in ("per_token", "group")]
    # Without the add it is the same kernel that holds a row less: of these the one whose loads are counted.
    found += [
        built("sm90", op, (7168,), SOME, early=True)
        for op in FORMS
        if op.startswith("add_rms_norm") or op in READ_AHEAD or (everything and op.startswith("rms_norm"))
    ]
    found.append(built("sm75", "add_rms_norm_mxfp4_quant", (7168,), MANY))
    found.append(built("sm90", dual, (1001, 333), MANY))
    json.dump(found, sys.stdout)
