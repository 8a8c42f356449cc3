"""What all engines share has to know of vLLM."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..host import Host

if TYPE_CHECKING:
    from ..compiled_module import CompiledModule

REPORT = "layerfuse-report.json"
POSITIONS = "positions"
"""What all of vLLM's models call an argument."""


def _ranks() -> tuple[int, int, Any]:
    state = sys.modules.get("vllm.distributed.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return 0, 1, None
    group = state.get_tp_group()
    return group.rank_in_group, group.world_size, group.cpu_group


def _group() -> str:
    from vllm.distributed.parallel_state import get_tp_group

    return str(get_tp_group().device_group.group_name)


def _report_file(compiled: CompiledModule) -> tuple[Path, str]:
    """As asked for, else beside what vLLM's compiler keeps, which all ranks share; else in its cache."""
    parallel, compilation = compiled.config.parallel_config, compiled.config.compilation_config
    if compiled.report_path is not None:
        path = Path(compiled.report_path).expanduser()
    elif compiled.artefact is not None:
        path = compiled.artefact.parent.parent / REPORT
    elif compilation.cache_dir:
        path = Path(compilation.cache_dir) / REPORT
    else:
        import vllm.envs

        path = Path(vllm.envs.VLLM_CACHE_ROOT) / "layerfuse" / compiled.config.compute_hash() / REPORT
    # Stages of a pipeline and replicas are engines of their own, as far as a report goes.
    stage = parallel.rank // parallel.tensor_parallel_size
    parts = [f"pp{stage}"] if parallel.pipeline_parallel_size > 1 else []
    parts += [f"dp{parallel.data_parallel_index}"] if parallel.data_parallel_size > 1 else []
    return path.with_name("-".join([path.stem, *parts]) + path.suffix), compiled.config.instance_id


def _fp8_dtype() -> Any:
    from vllm.platforms import current_platform

    return current_platform.fp8_dtype()


def _tokens(module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """All of vLLM's models take positions: one for each token, in several rows where it has several."""
    try:
        place = _place_of_positions(type(module).forward)
    except (TypeError, ValueError):  # somebody's object, or code in C
        place = None
    positions = kwargs.get(POSITIONS, args[place] if place is not None and place < len(args) else None)
    shape = getattr(positions, "shape", None)
    return int(shape[-1]) if shape else None


@cache
def _place_of_positions(forward: Any) -> int | None:
    """Among the arguments behind `self`."""
    taken = [*inspect.signature(forward).parameters][1:]
    return taken.index(POSITIONS) if POSITIONS in taken else None


VLLM = Host(
    name="vLLM",
    package="vllm",
    tested=("0.26.0", "0.33.0"),
    ranks=_ranks,
    group=_group,
    report_file=_report_file,
    fp8_dtype=_fp8_dtype,
    tokens=_tokens,
)
