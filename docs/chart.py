"""The chart of README.md, docs/assets/decode.svg, from what is on by default in vLLM and was timed in its newest release: `python docs/chart.py`."""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from layerfuse.fusion.policy import Measurement, shipped

OUT = Path(__file__).parent / "assets" / "decode.svg"
COLOURS = {"1": "#1b6ca8", "8": "#3aa17e", "64": "#c8842a", "256": "#8e5ea2"}
"""By batch."""


def named(row: Measurement) -> str:
    """What a row is of: the model, and what was on in it."""
    ranks = "" if row.ranks == 1 else f", {row.ranks} GPUs"
    linears = "" if row.linears is None else f"{row.linears}, "
    on = dict.fromkeys(re.sub("_(group|per_token|static)_quant$", "", name) for name in row.fusions)
    quant = " to fp8" if any(name.endswith("_quant") for name in row.fusions) else ""
    return f"{row.model}{ranks}\n{_short(list(on))}{quant} ({linears}{row.device.split()[1]})"


def _short(names: list[str]) -> str:
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 2 else ", ".join(names)


def main() -> None:
    """Write the chart: how many times faster a decode step is, with the 95 % interval."""
    rows = [row for row in shipped().measurement if row.engine == "vllm" and row.faster]
    newest = max(row.release for row in rows)
    rows = [row for row in rows if row.release == newest]
    with mpl.rc_context({"svg.hashsalt": "layerfuse", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(7.2, 0.55 * len(rows) + 0.8))
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        for place, row in enumerate(reversed(rows)):
            for number, (batch, (ratio, low, high)) in enumerate(row.decode.items()):
                shift = 0.2 * ((len(row.decode) - 1) / 2 - number)
                axes.plot([low, high], [place + shift] * 2, color=COLOURS[batch], linewidth=5, alpha=0.35)
                axes.plot(ratio, place + shift, "o", color=COLOURS[batch], markersize=5, label=f"batch {batch}")
        axes.axvline(1, color="grey", linewidth=1)
        axes.set_yticks(range(len(rows)), [named(row) for row in reversed(rows)])
        figure.supxlabel(f"times faster per decode step, in vLLM {newest.removesuffix('.0')}", fontsize=9)
        seen = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        handles = {f"batch {batch}": seen[f"batch {batch}"] for batch in COLOURS}
        figure.legend(handles.values(), handles.keys(), loc="upper center", ncols=4, frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
        figure.tight_layout(rect=(0, 0, 1, 0.96))
        figure.savefig(OUT, format="svg", metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    main()
