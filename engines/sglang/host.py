"""What all engines share has to know of SGLang."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..host import Host

if TYPE_CHECKING:
    from ..compiled_module import CompiledModule

REPORT = "layerfuse-report.json"


def _ranks() -> tuple[int, int, Any]:
    """Of the ranks that always run one batch together: under data-parallel attention those of one replica of it."""
    state = sys.modules.get("sglang.srt.distributed.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return 0, 1, None
    group = state.get_attn_tp_group()
    return group.rank_in_group, group.world_size, group.cpu_group


def _group() -> str:
    from sglang.srt.distributed.parallel_state import get_attn_tp_group

    return str(get_attn_tp_group().device_group.group_name)


def _report_file(compiled: CompiledModule) -> tuple[Path, str]:
    """As asked for, else in SGLang's cache by the model's name. Stages, replicas and drafts have files of their own."""
    from sglang.srt.environ import envs
    from sglang.srt.runtime_context import get_parallel

    runner, parallel = compiled.config, get_parallel()
    if compiled.report_path is not None:
        path = Path(compiled.report_path).expanduser()
    else:
        name = Path(runner.model_config.model_path).name or "model"
        path = Path(os.path.expanduser(envs.SGLANG_CACHE_DIR.get())) / "layerfuse" / name / REPORT
    parts = [f"pp{parallel.pp_rank}"] if parallel.pp_size > 1 else []
    parts += [f"dp{parallel.attn_dp_rank}"] if parallel.attn_dp_size > 1 else []
    parts += ["draft"] if runner.is_draft_worker else []
    # An engine's ranks on one host have one parent.
    return path.with_name("-".join([path.stem, *parts]) + path.suffix), str(os.getppid())


def _fp8_dtype() -> Any:
    from sglang.kernels.ops.quantization.fp8_kernel import fp8_dtype

    return fp8_dtype


def multiplies_by_the_largest_over_amax() -> bool:
    """Whether SGLang quantises groups by its kernel for CUDA (sglang/kernels/jit/csrc/gemm/per_token_group_quant.cuh); what it has elsewhere multiplies by one over the scale."""
    from sglang.kernels.ops.quantization import fp8_kernel

    return bool(fp8_kernel.per_token_group_quant_fp8 is fp8_kernel.sglang_per_token_group_quant_fp8)


def _captures() -> bool:
    mode = sys.modules.get("sglang.srt.model_executor.runner_utils.capture_mode")
    asked = None if mode is None else vars(mode).get("get_is_capture_mode")
    return asked is not None and bool(asked())


SGLANG = Host(
    name="SGLang",
    package="sglang",
    kernels=frozenset({"sgl_kernel", "flashinfer"}),
    tested=("0.5.23",),
    ranks=_ranks,
    group=_group,
    report_file=_report_file,
    fp8_dtype=_fp8_dtype,
    captures=_captures,
)
