"""The fused all-reduce on real ranks: hand-written layers, each way to reduce, against the layer itself on the same ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_on_ranks
from reduced_support import FORMS, REDUCED, Joined, Over, world
from stream_support import EPSILON, WIDTH, Norm
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import silu

from layerfuse.adapters.specs import FinalNormSpec, NormSpec, Parallel
from layerfuse.fusion import compile  # noqa: A004

TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 2e-5}, torch.bfloat16: {"rtol": 3e-2, "atol": 6e-2}}


def final(rank: int) -> FinalNormSpec:
    """A spec with one site, so that strict means this one."""
    norm = NormSpec(width=WIDTH, epsilon=EPSILON, module="norm")
    parallel = Parallel(size=dist.get_world_size(), rank=rank)
    return FinalNormSpec(hidden_size=WIDTH, layer_index=2, parallel=parallel, final_norm=norm)


def part_of(rank: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(rank)).to(dtype)


def op_by_op() -> None:
    """The rewritten graph without generated code, which is quick to compile."""
    import torch._inductor.compile_fx as inductor

    inductor.compile_fx_inner = lambda gm, _inputs, **_: gm


# ---- what runs on each rank


def held_against_itself(rank: int, over: Over, name: str, dtype: torch.dtype) -> list[list[float]]:
    """What one form gives on this rank, after it was held against the layer itself."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module, residual = Joined(FORMS[name], over, reads=torch.neg).to(dtype), part_of(99, dtype)
    fused = compile(module, specs=[("", final(rank))], strict=True)
    with torch.no_grad():
        unfused = module(part_of(rank, dtype), residual.clone())
        exact = copy.deepcopy(module).double()(part_of(rank, dtype).double(), residual.double())
        for _ in range(2):
            given = fused(part_of(rank, dtype), residual.clone())
            assert fused.report.of(REDUCED).last_call == 1, str(fused.report)
    for got, before, want in zip(given, unfused, exact, strict=True):
        torch.testing.assert_close(got.double(), want, msg=lambda text: f"{name}: {text}", **TOLERANCE[dtype])
        if dtype == torch.bfloat16:  # rounded less often, and so nearer to the exact result
            ours, theirs = ((each.double() - want).square().mean() for each in (got, before))
            assert ours < theirs, (name, ours, theirs)
    return [tensor.double().flatten().tolist() for tensor in given]


def on_two(rank: int) -> Any:
    """Every form, one with generated code, and torch's own parallel styles."""
    over = world()
    given = [held_against_itself(rank, over, "in_place", torch.bfloat16)]
    op_by_op()
    given += [held_against_itself(rank, over, name, torch.bfloat16) for name in FORMS]
    given += [held_against_itself(rank, over, name, torch.float32) for name in ("functional", "three")]
    torchs_own_parallel_styles(rank, over)
    return given


def on_four(rank: int) -> Any:
    """What may differ with the number of parts."""
    op_by_op()
    over = world()
    return [
        held_against_itself(rank, over, name, dtype)
        for name, dtype in zip(("functional", "three"), TOLERANCE, strict=True)
    ]


class Block(nn.Module):
    """An MLP whose result joins the stream, and the norm behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 64, bias=False)
        self.down = nn.Linear(64, WIDTH, bias=False)
        self.norm = Norm()

    def forward(self, x: Tensor) -> Any:
        total = x + self.down(silu(self.up(x)))
        return self.norm(total) * 1, total


def torchs_own_parallel_styles(rank: int, over: Over) -> None:
    """DTensor's, on a module that knows nothing of ranks, against the whole one."""
    torch._dynamo.reset()
    whole, x = Block(), part_of(99, torch.float32)
    sharded = parallelize_module(copy.deepcopy(whole), over.mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    assert sharded.down.weight.to_local().shape[1] == 64 // dist.get_world_size()
    fused = compile(sharded, specs=[("", final(rank))], strict=True)
    with torch.no_grad():
        for got, want in zip(fused(x), whole(x), strict=True):
            torch.testing.assert_close(got, want, **TOLERANCE[torch.float32])
    assert fused.report.of(REDUCED).last_call == 1


# ---- the tests


@pytest.mark.parametrize(("function", "size"), [(on_two, 2), pytest.param(on_four, 4, marks=pytest.mark.thorough)])
def test_ranks_get_what_the_layer_gives_and_all_the_same_bits(function: Any, size: int) -> None:
    one, *others = run_on_ranks(function, size)
    # Ranks whose bits differ would drift apart.
    assert all(other == one for other in others)
