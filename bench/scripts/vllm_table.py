"""What `vllm_engine` found, for people: a line for each stage and arm, and what it is worth in a whole model."""

from __future__ import annotations

from typing import Any

from workloads import SAID


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
                more = (
                    "" if timed is None or arm == stage.get("first", "vllm") else f" ({timed['times_faster'] or 0:.3f})"
                )
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
                f"; {key}: {each['ms']:.2f} ms ({each['times_faster'] or 0:.3f}{_between(each.get('times_faster_95'))}), "
                f"gpu {each['gpu_ms']:.2f}{_called(each)}"
                for key, each in found.items()
                if key.startswith("prompts")
            )
            lines.append(
                f"| {name} | {arm} | {' | '.join(cells)} | {fused or '-'}{late} | {said or '-'} | {_apart(found)} |"
            )
        lines += [f"{name}: {arm} failed: {error[:300]}" for arm, error in stage["errors"].items()]
    return "\n".join(lines + whole(results["stages"], batches))


def _between(interval: list[float] | None) -> str:
    return "" if interval is None else f", {interval[0]:.3f} to {interval[1]:.3f}"


def _called(found: dict[str, Any]) -> str:
    return f", {found['calls']} calls" if "calls" in found else ""


def whole(stages: dict[str, Any], batches: tuple[int, ...]) -> list[str]:
    """A line for each arm of a model whose kinds of layers were all timed: its step is their sum, times how many of each it has.

    Each arm stands against vLLM as installed, then against the fastest of vLLM's own ways.
    """
    lines = []
    for model, counts in SAID["vllm"]["whole"].items():
        if not set(counts) <= set(stages):
            continue
        kinds = {name: stages[name]["arms"] for name in counts}
        arms = [arm for arm in next(iter(kinds.values())) if all(arm in kind for kind in kinds.values())]
        for arm in arms:
            cells = []
            for batch in batches:
                steps = {each: _step(stages, counts, each, batch) for each in arms}
                own = [us for each, us in steps.items() if us and kinds[next(iter(counts))][each]["fusions"] is None]
                if (mine := steps[arm]) and (first := steps.get(stages[next(iter(counts))].get("first", "vllm"))):
                    cells.append(f"{mine / 1000:.2f} ms ({first / mine:.3f}, {min(own) / mine:.3f})")
                else:
                    cells.append("-")
            lines.append(f"| {model} | {arm} | {' | '.join(cells)} |")
    return ["", *lines] if lines else []


def _step(stages: dict[str, Any], counts: dict[str, int], arm: str, batch: int) -> float | None:
    """Microseconds of a whole model's step; None: a kind of layer was not timed."""
    timed = {name: stages[name]["arms"][arm].get(f"batch {batch}") for name in counts}
    if not all(timed.values()):
        return None
    return sum(timed[name]["us"] / stages[name]["layers"] * count for name, count in counts.items())


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
