"""Every fusion of the catalog against their peers, in one run: every result is checked against float64, every time has a floor.

    from layerfuse import bench

    result = bench.run("mla_dual_rms_norm", model="deepseek-v3", tokens=[1, 64, 4096])
    print(bench.markdown(result))
    bench.write(result, "results")

On the command line: `layerfuse bench mla_dual_rms_norm`. How it measures is docs/benchmarks.md. Importing this package
imports no torch; running it does.
"""

from .._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
