"""The kernels of others, as installed packages: a table by package and op, one line for each op that a package has."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor

from .inputs import Work
from .peers import Call, InPlace, Peer, Setting, missing, needs_gpu, needs_triton, over_sets

Results = tuple[Tensor, ...]
Function = Callable[..., Results]


@frozen(kw_only=True, eq=False)
class Offer:
    """What a package calls for one op."""

    about: str
    make: Callable[[Work], Function]
    "From the work to a function of the op's rows, with everything else bound."
    in_place: bool = False
    "Whether it writes over its rows."

    def calls(self, work: Work) -> Sequence[Call]:
        """One per set."""
        function = self.make(work)
        return [InPlace(function, rows) for rows in work.sets] if self.in_place else over_sets(function, work)


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


def why_not_offered(offers: dict[str, Offer], package: str, setting: Setting) -> str | None:
    """What of the question a package's kernels do not take, or None."""
    case = setting.case
    if case.op not in offers:
        return f"{package} has no kernel for {case.op}"
    if any(case.weight_offsets.values()):
        return f"{package} is not measured with zero-centred weights"
    if case.column_major:
        return f"{package} is not measured with column-major scales"
    return None


def peer_of(third: ThirdParty, setting: Setting) -> Peer:
    """A package as a peer for what is measured."""
    offer = third.offers.get(setting.case.op)
    return Peer(
        name=third.name,
        about=third.package if offer is None else offer.about,
        why_not=functools.partial(_why_not, third),
        build=lambda work, _: third.offers[setting.case.op].calls(work),
        version=lambda _: _version_of(third.package),
    )


def _why_not(third: ThirdParty, setting: Setting) -> str | None:
    said = why_not_offered(third.offers, third.package, setting)
    if said is None and missing(third.module.partition(".")[0]):
        said = f"{third.package} is not installed (pip install {third.package})"
    if said is None and setting.case.dtype not in third.dtypes:
        said = f"its kernels take {' and '.join(third.dtypes)}, not {setting.case.dtype}"
    return said or third.needs(setting) or _why_not_imported(third)


def _why_not_imported(third: ThirdParty) -> str | None:
    try:
        importlib.import_module(third.module)
    except Exception as error:  # a package that is built for another torch may fail in any way
        return f"{third.module} cannot be imported: {type(error).__name__}: {str(error).partition(chr(10))[0]}"[:300]
    return None


def _version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _norms_of(work: Work) -> tuple[tuple[Tensor, float], ...]:
    """The weight and the epsilon of each norm of the chain."""
    case = work.case
    return tuple((work.weights[norm.weight], case.epsilons[norm.epsilon]) for norm in case.declared.norms)


# ---- Liger-Kernel


def _liger_norms(work: Work) -> Function:
    from liger_kernel.transformers.functional import liger_rms_norm

    (q_weight, q_epsilon), (kv_weight, kv_epsilon) = _norms_of(work)

    def call(q: Tensor, kv: Tensor) -> Results:
        return (
            liger_rms_norm(q, q_weight, q_epsilon, in_place=False),
            liger_rms_norm(kv, kv_weight, kv_epsilon, in_place=False),
        )

    return call


def _liger_add(work: Work) -> Function:
    from liger_kernel.transformers.functional import liger_fused_add_rms_norm

    ((weight, epsilon),) = _norms_of(work)

    def call(x: Tensor, residual: Tensor) -> Results:
        normed, total = liger_fused_add_rms_norm(x, residual, weight, epsilon, in_place=False)
        return normed, total

    return call


# ---- flash-linear-attention


def _fla_modules(work: Work) -> list[Any]:
    from fla.modules import RMSNorm

    norms = []
    for weight, epsilon in _norms_of(work):
        norm = RMSNorm(weight.shape[0], eps=epsilon).to(work.device, work.dtype).requires_grad_(False)
        norm.weight.copy_(weight)
        norms.append(norm)
    return norms


def _fla_norms(work: Work) -> Function:
    q_norm, kv_norm = _fla_modules(work)
    return lambda q, kv: (q_norm(q), kv_norm(kv))


def _fla_add(work: Work) -> Function:
    (norm,) = _fla_modules(work)
    return lambda x, residual: tuple(norm(x, residual=residual, prenorm=True))


# ---- quack, FlashInfer, vLLM: only what fuses the residual add


def _quack_add(work: Work) -> Function:
    from quack import rmsnorm

    ((weight, epsilon),) = _norms_of(work)
    return lambda x, residual: tuple(rmsnorm(x, weight, residual=residual, eps=epsilon, prenorm=True))


def _flashinfer_add(work: Work) -> Function:
    from flashinfer.norm import fused_add_rmsnorm

    ((weight, epsilon),) = _norms_of(work)

    def call(x: Tensor, residual: Tensor) -> Results:
        fused_add_rmsnorm(x, residual, weight, epsilon)
        return x, residual

    return call


def _vllm_add(work: Work) -> Function:
    fused_add_rms_norm: Any = torch.ops._C.fused_add_rms_norm
    ((weight, epsilon),) = _norms_of(work)

    def call(x: Tensor, residual: Tensor) -> Results:
        fused_add_rms_norm(x, residual, weight, epsilon)
        return x, residual

    return call


_IN_PLACE = "in place, on copies of the inputs"

THIRD_PARTIES = (
    ThirdParty(
        name="liger", package="liger-kernel", module="liger_kernel.transformers.functional", needs=needs_triton,
        offers={
            "mla_dual_rms_norm": Offer(about="Liger-Kernel's liger_rms_norm twice", make=_liger_norms),
            "add_rms_norm": Offer(about="Liger-Kernel's liger_fused_add_rms_norm", make=_liger_add),
        },
    ),
    ThirdParty(
        name="fla", package="flash-linear-attention", module="fla.modules", needs=needs_triton,
        offers={
            "mla_dual_rms_norm": Offer(about="flash-linear-attention's RMSNorm module twice", make=_fla_norms),
            "add_rms_norm": Offer(about="flash-linear-attention's RMSNorm module with a residual", make=_fla_add),
        },
    ),
    ThirdParty(
        name="quack", package="quack-kernels", module="quack", needs=needs_gpu,
        offers={"add_rms_norm": Offer(about="quack.rmsnorm with a residual", make=_quack_add)},
    ),
    ThirdParty(
        name="flashinfer", package="flashinfer-python", module="flashinfer.norm", needs=needs_gpu, dtypes=("bf16", "fp16"),
        offers={
            "add_rms_norm": Offer(
                about=f"FlashInfer's fused_add_rmsnorm, {_IN_PLACE}", make=_flashinfer_add, in_place=True
            )
        },
    ),
    ThirdParty(
        name="vllm", package="vllm", module="vllm._C", needs=needs_gpu,
        offers={
            "add_rms_norm": Offer(about=f"vLLM's _C.fused_add_rms_norm, {_IN_PLACE}", make=_vllm_add, in_place=True)
        },
    ),
)  # fmt: skip
"""Every package that is measured where it is installed."""
