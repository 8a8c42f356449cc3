"""The script of the tables: every run of its lists is a case, a goal that is missed is named with its figure, and files are read back."""

import importlib
import sys

import pytest
from helpers import ROOT

from layerfuse.bench.cases import forms_over_ranks
from layerfuse.bench.result import Measured, Row

sys.path.append(str(ROOT / "bench" / "scripts"))
tables, given = importlib.import_module("tables"), importlib.import_module("table_runs")

RESULTS = ROOT / "bench" / "results"
OURS = "layerfuse (triton)"
NAMES = {
    "ours": OURS, "aiter": "aiter triton", "combo": "inductor combo_kernels", "nccl": "nccl + inductor", "vllm": "vllm + layerfuse",
    "one": "torch one-shot alone",
}  # fmt: skip
SINGLE = given.Run(
    op="add_rms_norm",
    widths=(256,),
    tokens=(1,),
    goals=(given.Goal("aiter triton", 0.8, 1, 64), given.Goal("copy", 1.05), given.Goal(given.INDUCTOR, 0.5)),
)
SEVERAL = [*given.on_several_gpus()]
PLAIN, *_, UNTUNED = [run for run in SEVERAL if run.op == given.PLAIN]
GROUP = next(run for run in SEVERAL if run.op == given.GROUP)


def row(tokens, **us):
    measured = [
        Measured(peer=NAMES.get(peer, peer), verdict="ok", us=time, low=time, high=time, rounds=1, calls=1, error=0.0,
                 quant_error=None, message="")
        for peer, time in us.items()
    ]  # fmt: skip
    return Row(tokens=tokens, sets=8, bytes_read=1, bytes_written=1, caches=None, measured=tuple(measured))


@pytest.mark.parametrize(("suite", "least"), [("gpu", 60), ("all_reduce", 8)])
def test_every_run_of_a_list_is_a_case_of_its_own(suite, least):
    suite = given.SUITES[suite]
    cases = [run.case(suite.gpus) for run in suite.runs()]
    assert len(cases) > least
    assert all(case not in cases[:place] for place, case in enumerate(cases))


def test_every_form_over_ranks_is_a_run():
    assert {run.op for run in SEVERAL} == set(forms_over_ranks())


@pytest.mark.parametrize(
    ("run", "us", "missed"),
    [
        (SINGLE, {"tokens": 1, "ours": 1.0, "copy": 1.0, "aiter": 1.3, "inductor": 3.0, "combo": 2.1}, []),
        (SINGLE, {"tokens": 1, "ours": 1.0, "copy": 1.0, "aiter": 1.1}, ["ours/aiter triton 0.909 > 0.800"]),
        (SINGLE, {"tokens": 65, "ours": 1.0, "copy": 1.0, "aiter": 1.1}, []),
        (SINGLE, {"tokens": 1, "ours": 1.1, "copy": 1.0}, ["ours/copy 1.100 > 1.050"]),
        (SINGLE, {"tokens": 1, "ours": 1.0, "inductor": 3.0, "combo": 1.5}, ["ours/better Inductor 0.667 > 0.500"]),
        (SINGLE, {"tokens": 1, "copy": 1.0}, ["ours has no time"]),
        (PLAIN, {"tokens": 1, "ours": 7.0, "nccl": 20.0, "vllm": 9.0, "one": 7.0}, []),
        (PLAIN, {"tokens": 32, "ours": 8.0, "nccl": 20.0, "vllm": 9.0, "one": 7.0}, ["ours/best unfused 0.889 > 0.850"]),
        (PLAIN, {"tokens": 1, "ours": 7.0, "nccl": 15.0, "vllm": 9.0, "one": 7.0}, ["ours/library, add and norm 0.467 > 0.450"]),
        (PLAIN, {"tokens": 1, "ours": 7.0, "nccl": 20.0, "one": 6.0}, ["ours/torch one-shot alone 1.167 > 1.150"]),
        (PLAIN, {"tokens": 80, "ours": 9.2, "nccl": 10.0}, ["ours/best unfused 0.920 > 0.900"]),
        (PLAIN, {"tokens": 256, "ours": 10.0, "nccl": 10.0}, []),
        (UNTUNED, {"tokens": 80, "ours": 9.8, "nccl": 10.0}, []),
        (GROUP, {"tokens": 8, "ours": 7.3}, []),
        (GROUP, {"tokens": 8, "ours": 7.4}, ["ours/without quantisation 1.057 > 1.050"]),
    ],
)  # fmt: skip
def test_a_missed_goal_is_named_with_its_figure(run, us, missed):
    assert tables.misses(run, row(**us), OURS, 7.0) == missed


@pytest.mark.parametrize("name", given.SUITES)
def test_the_tables_in_brief_are_those_of_the_files(name):
    suite = given.SUITES[name]
    assert (RESULTS / f"{name}_tables.md").read_text() == tables.brief(suite, tables.saved(suite, RESULTS))
