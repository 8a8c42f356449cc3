"""The script of the tables: every run of its list is a case, and a goal that is missed is named with its figure."""

import importlib
import sys

import pytest
from helpers import ROOT

from layerfuse.bench.result import Measured, Row

sys.path.append(str(ROOT / "benchmarks"))
tables = importlib.import_module("gpu_tables")

OURS = "layerfuse (triton)"
GOALS = (tables.Goal("aiter triton", 1.2, 1, 64), tables.Goal("copy", 1.05), tables.Goal(tables.INDUCTOR, 2.0))


def row(tokens, **us):
    names = {"ours": OURS, "aiter": "aiter triton", "combo": "inductor combo_kernels"}
    measured = [
        Measured(peer=names.get(peer, peer), verdict="ok", us=time, low=time, high=time, rounds=1, calls=1, error=0.0,
                 quant_error=None, message="")
        for peer, time in us.items()
    ]  # fmt: skip
    return Row(tokens=tokens, sets=8, bytes_read=1, bytes_written=1, caches=None, measured=tuple(measured))


def run(slack=0.0):
    return tables.Run(op="add_rms_norm", widths=(256,), goals=GOALS, slack=slack)


def test_every_run_of_the_list_is_a_case_of_its_own():
    cases = [each.case() for each in tables.runs()]
    assert len(cases) > 60
    assert all(case not in cases[:place] for place, case in enumerate(cases))


@pytest.mark.parametrize(
    ("given", "missed"),
    [
        ({"tokens": 1, "ours": 1.0, "copy": 1.0, "aiter": 1.3, "inductor": 3.0, "combo": 2.1}, []),
        ({"tokens": 1, "ours": 1.0, "copy": 1.0, "aiter": 1.1}, ["aiter triton 1.10 < 1.20"]),
        ({"tokens": 65, "ours": 1.0, "copy": 1.0, "aiter": 1.1}, []),
        ({"tokens": 1, "ours": 1.1, "copy": 1.0}, ["ours/copy 1.10 > 1.05"]),
        ({"tokens": 1, "ours": 1.0, "inductor": 3.0, "combo": 1.5}, ["better Inductor 1.50 < 2.00"]),
        ({"tokens": 1, "copy": 1.0}, ["ours has no time"]),
    ],
)
def test_a_missed_goal_is_named_with_its_figure(given, missed):
    assert tables.misses(run(), row(**given), OURS) == missed


def test_widths_that_nobody_tuned_for_may_miss_by_a_tenth():
    given = row(1, ours=1.1, copy=1.0, aiter=1.2)
    assert len(tables.misses(run(), given, OURS)) == 2
    assert tables.misses(run(slack=0.1), given, OURS) == []
