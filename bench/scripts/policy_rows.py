"""The cells of `policy.toml` from the results of `vllm_engine`: `python bench/scripts/policy_rows.py STAGE ARM [FILE [AGAINST]]` prints one row's."""

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


def cells(file: str, stage: str, arm: str, against: str = "vllm") -> dict[str, list[float]]:
    """Batch -> the ratio of the medians of the arm `against` and of this one, and the ends of the 95 % interval of the mean ratio of the turns."""
    arms = json.loads((RESULTS / file).read_text())["stages"][stage]["arms"]
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


def main(stage: str, arm: str, file: str = "vllm_engine.json", against: str = "vllm") -> Any:
    """Print the row."""
    print(
        "decode = { "
        + ", ".join(f"{batch} = {each}" for batch, each in cells(file, stage, arm, against).items())
        + " }"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
