"""vLLM's own all-reduce in a graph: its op takes a name of vLLM's, and the fused op the group's name in torch.distributed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

pytest.importorskip("vllm_layers")
sys.path.append(str(Path(__file__).parents[1] / "fusion"))

from fusion_support import trace
from reduced_support import REDUCED, Joined, sharded_spec
from stand_ins import fake_process_groups, init_fake_world
from stream_support import SITE, Layer, rows


@pytest.fixture
def coordinator() -> Iterator[Any]:
    from vllm.distributed.parallel_state import GroupCoordinator

    init_fake_world(2, 0)
    with fake_process_groups():
        yield GroupCoordinator([[0, 1]], 0, "gloo", use_device_communicator=False, group_name="layerfuse")
    dist.destroy_process_group()


def test_the_group_is_found_by_vllms_name(coordinator: Any) -> None:
    def join(part: Tensor, residual: Tensor, _over: Any) -> Tensor:
        return residual + torch.ops.vllm.all_reduce(part, group_name=coordinator.unique_name)

    module = Layer(Joined(join, coordinator, reads=torch.neg))
    traced = trace(module, *rows(), specs=[("layer", sharded_spec())])
    assert coordinator.unique_name.startswith("layerfuse:")
    assert traced.report.of(REDUCED).matched == (SITE,), str(traced.report)
    assert f", {coordinator.device_group.group_name}, 0.0)" in traced.after[0]
    assert "vllm.all_reduce" not in traced.after[0]
