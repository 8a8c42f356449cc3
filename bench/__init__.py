"""Every fusion of the catalog against their peers, in one run: every result is checked against float64, every time has a floor.

    from layerfuse import bench

    result = bench.run("mla_dual_rms_norm", model="deepseek-v3", tokens=[1, 64, 4096])
    print(bench.markdown(result))
    bench.write(result, "results")

On the command line: `layerfuse bench mla_dual_rms_norm`. How it measures is docs/benchmarks.md. Importing this package
imports no torch; running it does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import attach
from .cases import Case
from .choosing import Options
from .errors import BenchError, CannotMeasureError, UnknownFusionError, UnknownPeerError

if TYPE_CHECKING:
    from .files import write
    from .measure import run
    from .peers import InPlace, Peer, RefusedError, register, unregister
    from .rank_group import RankError
    from .ranks import Ranks
    from .report import markdown
    from .result import Result

_LATER = {
    "InPlace": ".peers",
    "Peer": ".peers",
    "RankError": ".rank_group",
    "Ranks": ".ranks",
    "RefusedError": ".peers",
    "Result": ".result",
    "markdown": ".report",
    "register": ".peers",
    "run": ".measure",
    "unregister": ".peers",
    "write": ".files",
}

__all__ = [
    "BenchError",
    "CannotMeasureError",
    "Case",
    "InPlace",
    "Options",
    "Peer",
    "RankError",
    "Ranks",
    "RefusedError",
    "Result",
    "UnknownFusionError",
    "UnknownPeerError",
    "markdown",
    "register",
    "run",
    "unregister",
    "write",
]

_getattr, _dir = attach(__name__, _LATER)
__getattr__, __dir__ = _getattr, lambda: sorted({*_dir(), *__all__})
