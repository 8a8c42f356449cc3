"""The kernels of others, as installed packages: a table by package and op, one line for each op that a package has."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor

from .cases import Case
from .environment import version_of
from .inputs import Work
from .peers import Call, InPlace, Peer, Setting, missing, needs_gpu, needs_triton, over_sets
from .rank_group import said

Results = tuple[Tensor, ...]
Function = Callable[..., Results]
_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"


@frozen(kw_only=True, eq=False)
class Offer:
    """What a package calls for one op."""

    about: str
    make: Callable[[Work], Function]
    "From the work to a function of the op's rows, with everything else bound."
    in_place: bool = False
    "Whether it writes over its rows."
    rows: Callable[[Work, tuple[Tensor, ...]], Sequence[Tensor]] = lambda _, rows: rows
    "From the op's rows to those that its function takes."
    takes: frozenset[str] = frozenset()
    "Of `_SPECIAL`, what it can do."
    refuses: Callable[[Case], str | None] = lambda _: None
    "Why its kernel cannot take a case, or None."

    def calls(self, work: Work) -> Sequence[Call]:
        """One per set."""
        function = self.make(work)
        if not self.in_place:
            return over_sets(function, work)
        return [InPlace(function, self.rows(work, rows)) for rows in work.sets]


@frozen(kw_only=True, eq=False)
class ThirdParty:
    """A package with kernels."""

    name: str
    "Of the peer."
    package: str
    "As pip calls it."
    module: str
    "What is imported to see whether it works."
    needs: Callable[[Setting], str | None]
    "What its kernels need of the machine: why they cannot run, or None."
    offers: dict[str, Offer] = field(repr=False)
    "By op."
    dtypes: tuple[str, ...] = ("bf16", "fp16", "fp32")


_SPECIAL: dict[str, tuple[Callable[[Case], bool], str]] = {
    "offset": (lambda case: any(case.weight_offsets.values()), "zero-centred weights"),
    "wide weights": (lambda case: case.weight_dtype != case.dtype, "weights of another dtype than the rows"),
    "column_major": (lambda case: case.column_major and not case.tma_aligned, "column-major scales"),
    "tma_aligned": (lambda case: case.tma_aligned, "TMA-aligned scales"),
    "ue8m0": (lambda case: case.ue8m0, "power-of-two scales"),
    "limit": (lambda case: case.limit is not None, "clamped gates"),
    "gate_first": (lambda case: case.norm_before_gate is False, "a gate before the norm"),
}
"""By name: whether a case has it, and what it is."""


def why_not_offered(offers: dict[str, Offer], package: str, setting: Setting) -> str | None:
    """What of the question a package's kernels do not take, or None."""
    case = setting.case
    offer = offers.get(case.op)
    if offer is None:
        return f"{package} has no kernel for {case.op}"
    for name, (has, what) in _SPECIAL.items():
        if has(case) and name not in offer.takes:
            return f"{package} is not measured with {what}"
    return offer.refuses(case)


def peer_of(third: ThirdParty, setting: Setting) -> Peer:
    """A package as a peer for what is measured."""
    offer = third.offers.get(setting.case.op)
    return Peer(
        name=third.name,
        about=third.package if offer is None else offer.about,
        why_not=functools.partial(_why_not, third),
        build=lambda work, _: third.offers[setting.case.op].calls(work),
        version=lambda _: version_of(third.package),
    )


def _why_not(third: ThirdParty, setting: Setting) -> str | None:
    refused = why_not_offered(third.offers, third.package, setting)
    if refused is None and setting.case.dtype not in third.dtypes:
        refused = f"its kernels take {' and '.join(third.dtypes)}, not {setting.case.dtype}"
    return refused or third.needs(setting) or why_not_imported(third)


def why_not_imported(third: ThirdParty) -> str | None:
    """Import it; None, or why that cannot be."""
    if missing(third.module.partition(".")[0]):
        return f"{third.package} is not installed (pip install {third.package})"
    try:
        with _compiling_as_before():
            importlib.import_module(third.module)
    except Exception as error:  # a package that is built for another torch may fail in any way
        return f"{third.module} cannot be imported: {said(error)}"
    return None


@contextmanager
def _compiling_as_before() -> Iterator[None]:
    """vLLM, imported, has Inductor compile one kernel after another from then on, here and in processes that follow. Other peers are compiled as without it."""
    from torch._inductor import config

    threads, said = config.compile_threads, os.environ.get(_THREADS)
    try:
        yield
    finally:
        config.compile_threads = threads
        os.environ.pop(_THREADS, None)
        if said is not None:
            os.environ[_THREADS] = said


def norms_of(work: Work) -> tuple[tuple[Tensor, float], ...]:
    """The weight and the epsilon of each norm of the chain."""
    norms: list[Any] = [step for step in work.case.form.chain if step.is_norm]
    return tuple((work.weights[norm.weight], work.case.epsilons[norm.epsilon]) for norm in norms)


def halves_joined(gate: Tensor, up: Tensor) -> Tensor:
    """The tensor (tokens, 2 * width) whose halves these are."""
    if up.data_ptr() != gate.data_ptr() + gate.shape[-1] * gate.itemsize or gate.stride() != up.stride():
        raise ValueError("gate and up are no halves of one tensor")
    return gate.as_strided((gate.shape[0], 2 * gate.shape[-1]), gate.stride())


# ---- flash-linear-attention


def _fla_gated(work: Work) -> Function:
    from fla.modules import FusedRMSNormGated

    ((weight, epsilon),) = norms_of(work)
    activation = "swish" if work.case.activation == "silu" else work.case.activation
    norm: Any = FusedRMSNormGated(weight.shape[0], eps=epsilon, activation=activation)
    norm = norm.to(work.device, weight.dtype).requires_grad_(False)
    norm.weight.copy_(weight)
    return lambda x, gate: (norm(x, gate),)


# ---- FlashInfer


def _flashinfer_add(work: Work) -> Function:
    from flashinfer.norm import fused_add_rmsnorm

    ((weight, epsilon),) = norms_of(work)

    def call(x: Tensor, residual: Tensor) -> Results:
        fused_add_rmsnorm(x, residual, weight, epsilon)
        return x, residual

    return call


def _flashinfer_static(work: Work) -> Function:
    from flashinfer.norm import fused_add_rmsnorm_quant, rmsnorm_quant

    ((weight, epsilon),) = norms_of(work)
    scale = work.weights["scale"]

    def call(x: Tensor, *residual: Tensor) -> Results:
        out = torch.empty(x.shape, dtype=work.fp8, device=x.device)
        if residual:
            fused_add_rmsnorm_quant(out, x, residual[0], weight, scale, epsilon)
        else:
            rmsnorm_quant(out, x, weight, scale, epsilon)
        return (out, *residual)

    return call


IN_PLACE = "in place, on copies of the inputs"

THIRD_PARTIES = (
    ThirdParty(
        name="fla", package="flash-linear-attention", module="fla.modules", needs=needs_triton,
        offers={
            "gated_rms_norm": Offer(
                about="flash-linear-attention's FusedRMSNormGated module", make=_fla_gated, takes=frozenset({"wide weights"})
            ),
        },
    ),
    ThirdParty(
        name="flashinfer", package="flashinfer-python", module="flashinfer.norm", needs=needs_gpu, dtypes=("bf16", "fp16"),
        offers={
            "add_rms_norm": Offer(
                about=f"FlashInfer's fused_add_rmsnorm, {IN_PLACE}", make=_flashinfer_add, in_place=True
            ),
            "rms_norm_static_quant": Offer(
                about="FlashInfer's rmsnorm_quant", make=_flashinfer_static
            ),
            "add_rms_norm_static_quant": Offer(
                about=f"FlashInfer's fused_add_rmsnorm_quant, {IN_PLACE}", make=_flashinfer_static, in_place=True,
            ),
        },
    ),
)  # fmt: skip
"""Every package that is measured where it is installed."""
