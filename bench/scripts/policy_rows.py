"""A row of `policy.toml` from the results of `vllm_engine` or `sglang_engine`, as far as the file says it.

    python bench/scripts/policy_rows.py STAGE ARM [FILE [AGAINST]]

`release`, `model`, `linears`, what else the row holds under and which fusions are on by default there are to be added by hand. What may not be on is said: log probabilities that
exceed the rule, problems, and sites that were missed.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}
"""Number of turns -> the two-sided 95 % quantile of Student's t."""


def cells(file: str, stage: str, arm: str, against: str | None = None) -> dict[str, list[float]]:
    """Batch -> the ratio of the medians of the arm `against`, the engine's own if not given, and of this one, and the ends of the 95 % interval of the mean ratio of the turns."""
    found = json.loads((RESULTS / file).read_text())["stages"][stage]
    arms, against = found["arms"], against or found.get("first", "vllm")
    return {
        name.removeprefix("batch "): cell(arms[against][name]["turns_us"], each["turns_us"])
        for name, each in arms[arm].items()
        if name.startswith("batch ")
    }


def cell(without: list[float], with_it: list[float]) -> list[float]:
    """One cell, from the times of the turns."""
    ratios = [off / on for off, on in zip(without, with_it, strict=True)]
    mean = statistics.mean(ratios)
    half = STUDENT[len(ratios)] * statistics.stdev(ratios) / math.sqrt(len(ratios))
    ratio = statistics.median(without) / statistics.median(with_it)
    return [round(number, 4) for number in (ratio, min(mean - half, ratio), max(mean + half, ratio))]


def row(file: str, stage: str, arm: str, against: str | None = None) -> dict[str, Any]:
    """What the file says of a row, key by key."""
    results = json.loads((RESULTS / file).read_text())
    found = results["stages"][stage]
    fusions = [each.removeprefix("+") for each in found["arms"][arm]["fusions"] if each[0] != "-"] or ["default"]
    environment = {**results.get("environment", {}), **found.get("environment", {})}
    said = {
        "fusions": None if fusions == ["default"] else fusions,
        "engine": found.get("first", "vllm"),
        "device": environment.get("gpus", [""])[0].partition(",")[0],
        "decode": cells(file, stage, arm, against),
        "date": environment.get("began", "")[:10],
        "commit": found.get("commit", environment.get("commit")),
        "file": file,
        "stage": stage,
        "arm": arm,
    }
    return said if against is None else {**said, "against": against}


def why_not(file: str, stage: str, arm: str) -> list[str]:
    """What speaks against a row, as sentences."""
    found = json.loads((RESULTS / file).read_text())["stages"][stage]
    given = found["arms"][arm]
    return [
        *(f"log probabilities: {each}" for each in given.get("exceeds", ["not compared"])),
        *given.get("problems", ["no report was written"]),
        *(f"missed: {each}" for each in given.get("missed", ())),
        *(f"{name}: {each}" for name, each in found["errors"].items() if name == arm),
    ]


def in_toml(said: dict[str, Any]) -> str:
    """The row as `policy.toml` has it."""
    batches = ", ".join(f"{batch} = {each}" for batch, each in said["decode"].items())
    plain = {**said, "decode": None, "date": None}
    lines = {key: f"{key} = {json.dumps(each)}" for key, each in plain.items() if each is not None}
    lines |= {"decode": f"decode = {{ {batches} }}", "date": f"date = {said['date']}"}
    return "\n".join(["[[measurement]]", *(lines[key] for key in said if key in lines)])


def main(stage: str, arm: str, file: str = "vllm_engine.json", against: str | None = None) -> Any:
    """Print the row."""
    print(in_toml(row(file, stage, arm, against)))
    for each in why_not(file, stage, arm):
        print(f"# {each}")


if __name__ == "__main__":
    main(*sys.argv[1:])
