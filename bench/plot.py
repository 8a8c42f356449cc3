"""A result as a picture: time over tokens, and how far everybody is from the copy."""

from __future__ import annotations

import importlib.util
import io
from typing import Any

from .report import heading
from .result import COPY, Result

REMEDY = "matplotlib is not installed; pip install 'layerfuse[plot]'"


def why_not() -> str | None:
    """Why there is no picture, or None."""
    return REMEDY if importlib.util.find_spec("matplotlib") is None else None


def svg(result: Result) -> str:
    """The picture; the same result gives the same text."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "layerfuse", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(11, 4.6), layout="constrained")
        FigureCanvasSVG(figure)
        times, ratios = figure.subplots(1, 2)
        for number, name in enumerate(result.present):
            style = _style(result, name, number)
            _line(times, result, name, style, relative=False)
            if name != COPY:
                _line(ratios, result, name, style, relative=True)
        _dress(times, result, "microseconds per call")
        _dress(ratios, result, "time divided by that of the copy")
        ratios.axhline(1, color="0.6", linewidth=1, linestyle=":")
        times.legend(fontsize=8, frameon=False)
        figure.suptitle(_wrapped(heading(result)), fontsize=9)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def _style(result: Result, name: str, number: int) -> dict[str, Any]:
    if name == COPY:
        return {"color": "0.6", "linestyle": ":", "marker": None}
    if name == result.ours:
        return {"color": "black", "linewidth": 2.2, "marker": "o"}
    return {"color": f"C{number}", "linewidth": 1.2, "marker": "osv^D"[number % 5], "markersize": 4}


def _line(axes: Any, result: Result, name: str, style: dict[str, Any], *, relative: bool) -> None:
    points = []
    for row in result.rows:
        us, floor = row.us(name), row.us(COPY) if relative else 1.0
        if us is not None and floor is not None:
            points.append((row.tokens, us / floor))
    if points:
        axes.plot(*zip(*points, strict=True), label=name, **style)


def _dress(axes: Any, result: Result, label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    tokens = [row.tokens for row in result.rows]
    axes.set_xticks(tokens, [str(count) for count in tokens], rotation=45)
    axes.set_xlabel("tokens")
    axes.set_ylabel(label)
    axes.grid(visible=True, which="major", linewidth=0.4, color="0.85")


def _wrapped(text: str) -> str:
    import textwrap

    return "\n".join(textwrap.wrap(text, 120))
