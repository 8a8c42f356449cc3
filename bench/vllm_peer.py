"""vLLM's CUDA ops as a peer, loaded from its compiled library alone: vLLM's Python is neither imported nor needed.

`--vllm` takes the library or a folder that holds it; else that of an installed vLLM is taken. It is built for one release of
torch, and another one says so when it loads.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..fusion.ops.quantisation import empty_scales
from ..fusion.steps import Add
from .cases import Case, step_of
from .inputs import Work
from .peers import Peer, Setting, needs_gpu
from .thirdparty import IN_PLACE, Function, Offer, Results, halves_joined, norms_of, why_not_offered

LIBRARIES = ("_C_stable_libtorch.abi3.so", "_C.abi3.so")
"""Where releases keep these ops, the newest first."""


def _ops() -> Any:
    return torch.ops._C


def _values(work: Work, like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=work.fp8, device=like.device)


def _scales(work: Work, like: Tensor) -> Tensor:
    return empty_scales(like, work.case.group_size, work.case.column_major, work.case.tma_aligned)


def _add(work: Work) -> Function:
    ((weight, epsilon),) = norms_of(work)

    def call(x: Tensor, residual: Tensor) -> Results:
        _ops().fused_add_rms_norm(x, residual, weight, epsilon)
        return x, residual

    return call


def _static(work: Work) -> Function:
    ((weight, epsilon),) = norms_of(work)
    scale = work.weights["scale"]

    def call(x: Tensor, *residual: Tensor) -> Results:
        values = _values(work, x)
        if residual:
            _ops().fused_add_rms_norm_static_fp8_quant(values, x, residual[0], weight, scale, epsilon)
        else:
            _ops().rms_norm_static_fp8_quant(values, x, weight, scale, epsilon)
        return (values, *residual)

    return call


def _per_token(work: Work) -> Function:
    ((weight, epsilon),) = norms_of(work)

    def call(x: Tensor, residual: Tensor | None = None) -> Results:
        values, scales = _values(work, x), _scales(work, x)
        _ops().rms_norm_dynamic_per_token_quant(values, x, weight, scales, epsilon, None, residual)
        return (values, scales) if residual is None else (values, scales, residual)

    return call


def _group(work: Work) -> Function:
    ((weight, epsilon),) = norms_of(work)
    size, turned = work.case.group_size, work.case.column_major

    def call(x: Tensor, residual: Tensor | None = None) -> Results:
        values, scales = _values(work, x), _scales(work, x)
        _ops().rms_norm_per_block_quant(values, x, weight, scales, epsilon, None, residual, size, turned)
        return (values, scales) if residual is None else (values, scales, residual)

    return call


def _silu_static(work: Work) -> Function:
    scale = work.weights["scale"]

    def call(gate: Tensor, up: Tensor) -> Results:
        values = _values(work, gate)
        _ops().silu_and_mul_quant(values, halves_joined(gate, up), scale)
        return (values,)

    return call


def _silu_group(work: Work) -> Function:
    size, turned = work.case.group_size, work.case.column_major

    def call(gate: Tensor, up: Tensor) -> Results:
        values, scales = _values(work, gate), _scales(work, gate)
        _ops().silu_and_mul_per_block_quant(values, halves_joined(gate, up), scales, size, None, turned)
        return values, scales

    return call


def _silu_per_token(work: Work) -> Function:
    def call(gate: Tensor, up: Tensor) -> Results:
        product = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        values, scales = _values(work, gate), _scales(work, gate)
        _ops().silu_and_mul(product, halves_joined(gate, up))
        _ops().dynamic_per_token_scaled_fp8_quant(values, product, scales, None)
        return values, scales

    return call


def _whole_groups(case: Case) -> str | None:
    width, size = case.width_of(case.form.op.rows[0].name), case.group_size
    if size not in (64, 128):
        return f"vLLM's kernels have groups of 64 and 128 columns, not {size}"
    return f"vLLM's kernels want whole groups, and {width} columns are none of {size}" if width % size else None


def _offer(called: str, make: Callable[[Work], Function], **more: Any) -> Offer:
    return Offer(about=f"vLLM's _C.{called}", make=make, rounds_between=True, **more)


_TURNED = frozenset({"column_major", "tma_aligned"})
_SILU_TURNED = frozenset({"column_major"})

OFFERS: dict[str, Offer] = {
    "add_rms_norm": _offer(f"fused_add_rms_norm, {IN_PLACE}", _add, in_place=True),
    "rms_norm_static_quant": _offer("rms_norm_static_fp8_quant", _static),
    "add_rms_norm_static_quant": _offer(f"fused_add_rms_norm_static_fp8_quant, {IN_PLACE}", _static, in_place=True),
    "rms_norm_per_token_quant": _offer("rms_norm_dynamic_per_token_quant", _per_token),
    "add_rms_norm_per_token_quant": _offer(
        f"rms_norm_dynamic_per_token_quant with a residual, {IN_PLACE}", _per_token, in_place=True
    ),
    "rms_norm_group_quant": _offer("rms_norm_per_block_quant", _group, takes=_TURNED, refuses=_whole_groups),
    "add_rms_norm_group_quant": _offer(
        f"rms_norm_per_block_quant with a residual, {IN_PLACE}", _group, in_place=True, takes=_TURNED,
        refuses=_whole_groups,
    ),
    "silu_mul_static_quant": _offer("silu_and_mul_quant", _silu_static),
    "silu_mul_per_token_quant": _offer("silu_and_mul and dynamic_per_token_scaled_fp8_quant", _silu_per_token),
    "silu_mul_group_quant": _offer(
        "silu_and_mul_per_block_quant", _silu_group, takes=_SILU_TURNED, refuses=_whole_groups
    ),
}  # fmt: skip
"""By op."""


def vllm_peer(setting: Setting) -> Peer:
    """What vLLM has for what is measured, as a peer."""
    offer = OFFERS.get(setting.case.op)
    return Peer(
        name="vllm",
        about="vLLM's CUDA ops" if offer is None else offer.about,
        why_not=_why_not,
        build=lambda work, _: OFFERS[setting.case.op].calls(work),
        rounds_between=offer is not None and offer.rounds_between,
        version=lambda setting: version_of(library_of(setting.vllm)),
    )


def _why_not(setting: Setting) -> str | None:
    said = why_not_offered(OFFERS, "vLLM's compiled library", setting)
    if said is None and setting.case.dtype == "fp32" and step_of(setting.case.form, Add) is not None:
        said = "vLLM's fused add is for bf16 and fp16"
    return said or needs_gpu(setting) or why_not_loaded(setting)


def why_not_loaded(setting: Setting) -> str | None:
    """Load the library, if it was not; None, or why it cannot be."""
    library = library_of(setting.vllm)
    if library is None:
        where = "vLLM is not installed" if setting.vllm is None else f"{setting.vllm.name} holds none of its libraries"
        return f"{where}; --vllm takes the folder of {LIBRARIES[0]}"
    return _load(str(library))


def library_of(given: Path | None) -> Path | None:
    """The file, or None where there is none."""
    if given is not None and given.is_file():
        return given
    spec = importlib.util.find_spec("vllm") if given is None else None
    folders = [given] if given is not None else list(map(Path, (spec and spec.submodule_search_locations) or ()))
    found = (folder / name for name in LIBRARIES for folder in folders)
    return next((path for path in found if path.is_file()), None)


@functools.cache
def _load(path: str) -> str | None:
    """Load a library once; None, or why it cannot be."""
    try:
        if not hasattr(torch.ops._C, "rms_norm"):
            torch.ops.load_library(path)
    except OSError as error:
        # torch says only that it could not; the loader's own words are the cause.
        return f"{Path(path).name} cannot be loaded: {str(error.__cause__ or error).splitlines()[0]}"[:300]
    return None if hasattr(torch.ops._C, "rms_norm") else f"{Path(path).name} holds no norm"


def version_of(library: Path | None) -> str | None:
    """Of the installed package; a library alone does not say."""
    from importlib import metadata

    try:
        return metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return None if library is None else library.name
