"""What `vllm_engine` found, for people."""

from __future__ import annotations

from typing import Any


def table(results: dict[str, Any], batches: tuple[int, ...]) -> str:
    """A line for each stage and arm."""
    lines = [
        "| stage | arm | "
        + " | ".join(f"batch {batch}" for batch in batches)
        + " | fused kernels | tokens | log probabilities |"
    ]
    lines.append("|" + "---|" * (len(batches) + 5))
    for name, stage in results["stages"].items():
        for arm, found in stage["arms"].items():
            cells = []
            for batch in batches:
                timed = found.get(f"batch {batch}")
                more = "" if timed is None or arm == "vllm" else f" ({timed['times_faster']:.3f})"
                cells.append("-" if timed is None else f"{timed['us']:.1f} us{more}")
            agreed = found.get("agreement")
            said = (
                ""
                if agreed is None
                else f"{agreed['the same']} of {agreed['sequences']}, {agreed['beyond one step']} beyond a tie"
            )
            fused = ", ".join(f"{count:g} {kernel}" for kernel, count in found.get(f"fused {batches[0]}", {}).items())
            late = f"; {len(found['late'])} compiled late" if found.get("late") else ""
            late += "".join(
                f"; {key}: {each['ms']:.2f} ms ({each['times_faster'] or 0:.3f})"
                + "".join(f", {part} {each[f'{part}_ms']:.2f}" for part in ("gpu", "host") if f"{part}_ms" in each)
                for key, each in found.items()
                if key.startswith("prompts")
            )
            lines.append(
                f"| {name} | {arm} | {' | '.join(cells)} | {fused or '-'}{late} | {said or '-'} | {_apart(found)} |"
            )
        lines += [f"{name}: {arm} failed: {error[:300]}" for arm, error in stage["errors"].items()]
    return "\n".join(lines)


def _apart(found: dict[str, Any]) -> str:
    """In words."""
    parts = {"": found["log probabilities"]} if "log probabilities" in found else found.get("ways", {})
    said = [
        f"{name}{': ' if name else ''}{one['prompt']['mean']:.4f} prompt, {one['tokens']['mean']:.4f} decoded, "
        f"{one['other beyond a tie']} of {one['tokens']['of']} best tokens beyond a tie"
        for name, one in parts.items()
        if name in ("", "other batches")
    ]
    if "exceeds" in found:
        said += [", ".join(found["exceeds"]) or "holds"]
    return "; ".join(said) or "-"
