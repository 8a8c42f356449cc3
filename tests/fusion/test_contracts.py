"""The contracts of steps, fusions and kernels (docs/contract.md): the catalog keeps them, and what breaks one is told which."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import SkipTest

import pytest
import torch
from family_support import DEVICE, FORMS, GPU
from fusion_support import FusedProjection, LlamaNorm, mla_spec
from gated_support import GATED, INNER, GatedMLP, GatedNorm, Heads, delta_net, mlp
from quant_support import CPU_FP8, config, vllm_group
from stream_support import Layer, Norm, Stream, rows
from torch import Tensor, nn

from layerfuse.adapters.errors import LayerfuseError
from layerfuse.adapters.specs import WHOLE, FinalNormSpec, NormSpec
from layerfuse.fusion import FUSIONS, backends, steps
from layerfuse.fusion.backends import Backend
from layerfuse.fusion.chain import Fusion
from layerfuse.fusion.declare import Epsilon, Kernel, Like, Op, OpError, Quantised, Rows, Weight
from layerfuse.fusion.ops.library import define
from layerfuse.testing import AdapterContract, BrokenContractError, FusionContract, KernelContract, StepContract

FP8 = {name for name, form in FORMS.items() if any(isinstance(each, Quantised) for each in form.op.results)}


def held(contract: type[Any], name: str, **body: Any) -> None:
    globals()[f"Test{contract.__name__}_{name}"] = type(f"Test{contract.__name__}_{name}", (contract,), body)


for _name, _fusion in FUSIONS.items():
    if _fusion.op.chain is not None and not _fusion.across_ranks:
        held(FusionContract, _name, fusion=_name)
for _name in FORMS:
    # Triton's interpreter rounds to fp8 as no hardware does: without a GPU those results are held to float64 in test_family.
    if importlib.util.find_spec("triton") is not None and (GPU or _name not in FP8):
        _widths = (
            (1, 33, 128, 2400)
            if _name in ("add_rms_norm", "rms_norm")
            else (33, 128, 2400)
            if "dual" in _name
            else (128,)
        )
        _held = {"op": _name, "backend": "triton", "widths": _widths, "dtypes": (torch.bfloat16, torch.float32)}
        held(KernelContract, _name, device=DEVICE, **_held)

# ---- steps, in models that have them and in models that have something like them


FINAL = FinalNormSpec(
    hidden_size=256, layer_index=1, parallel=WHOLE, final_norm=NormSpec(width=256, epsilon=1e-6, module="norm")
)


class TestAddAndNorm(StepContract):
    fusion = "add_rms_norm"

    def build(self, norm: Callable[..., nn.Module] = Norm) -> Any:
        return Layer(Stream(lambda x: x * 2, norm())), [("layer", FINAL)], rows(dtype=torch.float32)

    def build_alike(self) -> Any:
        return self.build(partial(nn.LayerNorm, 256))


class TestLatentNorms(StepContract):
    fusion = "mla_dual_rms_norm"

    def build(self, norm: Callable[..., nn.Module] = LlamaNorm) -> Any:
        return FusedProjection(norm), [("", mla_spec())], (torch.randn(3, 64),)

    def build_alike(self) -> Any:
        return self.build(lambda width, _: nn.LayerNorm(width))


class TestGatedNorm(StepContract):
    fusion = GATED

    def build(self, gate: Callable[[Tensor], Tensor] = nn.functional.silu) -> Any:
        return Heads(GatedNorm(gate)), [("", delta_net())], (torch.randn(2, 3, 64),)

    def build_alike(self) -> Any:
        return self.build(torch.sigmoid)


class TestQuantisedProduct(StepContract):
    fusion, config, target = "silu_mul_group_quant", config("group128"), CPU_FP8

    def build(self, product: Callable[[Tensor, Tensor], Tensor] | None = None) -> Any:
        made = GatedMLP(vllm_group) if product is None else GatedMLP(vllm_group, product)
        return made.bfloat16(), [("", mlp(width=INNER))], (torch.randn(5, 64).bfloat16(),)

    def build_alike(self) -> Any:
        return self.build(lambda gate, up: torch.tanh(gate) * up)


# ---- what breaks a contract

ROW, WEIGHT = Rows(name="x"), Weight(name="weight", of="x")


def norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * weight).to(x.dtype)


def rounds_early(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight


def writes(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x.copy_(norm(x, weight, epsilon)).clone()


def keeps_strides(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(norm(x, weight, epsilon))


def of_the_memory_behind(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return norm(x.as_strided(x.shape, torch.empty(x.shape).stride()), weight, epsilon)


def leaves_the_last(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    made = torch.empty_like(x, memory_format=torch.contiguous_format)
    made[..., :-1] = norm(x, weight, epsilon)[..., :-1]
    return made


def takes_too_few(x: Tensor, weight: Tensor) -> Tensor:
    return norm(x, weight, 1e-6)


def takes_too_many(x: Tensor, weight: Tensor, epsilon: float, offset: float) -> Tensor:
    return norm(x, weight + offset, epsilon)


def fails_without_rows(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return norm(x, weight, epsilon + 0 * float(x.flatten()[0]))


def op(name: str, reference: Callable[..., Any] = norm) -> Op:
    args = (ROW, WEIGHT, Epsilon())
    made = Op(name=name, doc="A norm.", args=args, results=(Like(name="y", of="x"),), reference=reference)
    define(made)
    return made


def problem_of(contract: Any, scenario: str) -> str:
    (method,) = (name for name in dir(contract) if name.startswith(f"test_{scenario}"))
    with pytest.raises((BrokenContractError, OpError, RuntimeError, IndexError)) as broken:
        getattr(contract, method)()
    return f"{broken.type.__name__}: {broken.value}"


@pytest.mark.usefixtures("_spare")
@pytest.mark.parametrize(
    ("reference", "scenario", "says"),
    [
        (keeps_strides, "f01", "y is .* and the op declares"),
        (rounds_early, "f04", "y is .* roundings of torch.bfloat16 away"),
        (writes, "f03", "writes to x"),
        (of_the_memory_behind, "f03", "y depends on the strides of its inputs"),
    ],
)
def test_a_fusion_that_breaks_its_contract_is_told_how(
    reference: Callable[..., Any], scenario: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = op(f"spare_{reference.__name__}_{scenario}", reference)
    fusion = Fusion(
        name="spare", doc="", level=1, roles=("final",), chain=(steps.Norm(out="y", weight_offset=None),), op=made
    )
    monkeypatch.setattr(FusionContract, "asked", fusion)
    assert re.search(says, problem_of(FusionContract(), scenario))


@pytest.mark.usefixtures("_spare")
@pytest.mark.parametrize(
    ("kernel", "scenario", "says"),
    [
        (leaves_the_last, "k02", r"first at \[0, 127\]: nan"),
        (rounds_early, "k02", "away from the reference, first at"),
        (keeps_strides, "k02", "y is .*, and should be"),
        (fails_without_rows, "k03", "IndexError"),
        (writes, "k04", "x was written to"),
        (takes_too_few, "k02", r"by spare: the kernel takes \(x, weight\), the op passes \(x, weight, epsilon\)$"),
        (takes_too_many, "k03", r"by spare: the kernel takes \(x, weight, epsilon, offset\), the op passes"),
    ],
)
def test_a_kernel_that_breaks_its_contract_is_told_how(kernel: Callable[..., Any], scenario: str, says: str) -> None:
    made = op(f"spare_{kernel.__name__}_{scenario}")

    class Spare(Backend):
        name = "spare"

        def load(self) -> Any:
            return kernel

    backends.register(Spare(op=made, kernel=Kernel(backend="spare", function="spare:kernel")))
    contract = type("Contract", (KernelContract,), {"op": made.name, "backend": "spare"})()
    assert re.search(says, problem_of(contract, scenario))


@pytest.mark.usefixtures("_spare")
def test_a_kernel_that_refuses_says_why_and_one_that_refuses_all_is_held_to_nothing() -> None:
    made = op("spare_refuses")

    class Spare(Backend):
        name = "spare"

        def refuses(self, case: Any) -> str | None:
            return "no"

    backends.register(Spare(op=made, kernel=Kernel(backend="spare", function="spare:kernel")))
    contract = type("Contract", (KernelContract,), {"op": made.name, "backend": "spare"})()
    assert "refuses Case(dtype=torch.bfloat16, width=1" in problem_of(contract, "k01")
    with pytest.raises(SkipTest, match="spare takes no call here: no"):
        contract.test_k02_equal_to_the_reference()


@pytest.mark.parametrize(
    ("contract", "body", "asked", "says"),
    [
        (
            FusionContract,
            {"fusion": "add_rmsnorm"},
            "asked",
            "no fusion is called 'add_rmsnorm'; did you mean 'add_rms_norm'",
        ),
        (
            StepContract,
            {"fusion": "add_rmsnorm"},
            "asked",
            "no fusion is called 'add_rmsnorm'; did you mean 'add_rms_norm'",
        ),
        (KernelContract, {"op": "add_rmsnorm"}, "asked", "no op is called 'add_rmsnorm'; did you mean 'add_rms_norm'"),
        (AdapterContract, {"model": "gpt-os"}, "entry", "no model is called 'gpt-os'; did you mean gpt-oss-20b"),
        (FusionContract, {}, "asked", "Mine.fusion must be the name of a fusion"),
        (KernelContract, {}, "asked", "Mine.op must be the name of an op"),
        (KernelContract, {}, "backend", "Mine.backend must be the name of a backend"),
        (AdapterContract, {}, "entry", "Mine.model must be the name of a declared model"),
    ],
)
def test_what_a_contract_is_of_is_asked_for(contract: type[Any], body: dict[str, str], asked: str, says: str) -> None:
    made = type("Mine", (contract,), body)()
    with pytest.raises((LayerfuseError, AttributeError), match=re.escape(says)):
        getattr(made, asked)


def test_a_step_that_is_not_found_or_is_found_where_it_is_not_breaks_its_contract() -> None:
    class Not(TestAddAndNorm):
        def build(self, norm: Callable[..., nn.Module] = Norm) -> Any:
            return super().build(partial(nn.LayerNorm, 256))

        def build_alike(self) -> Any:
            return TestAddAndNorm().build()

    assert "add_rms_norm: expected at 1 site, matched at 0; layer:final: " in problem_of(Not(), "s02")
    assert "add_rms_norm was put at layer:final" in problem_of(Not(), "s03")
