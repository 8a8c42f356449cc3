"""The script of the all-reduces' tables: every run is a case, and a goal that is missed is named with its figure."""

import importlib
import sys

import pytest
from helpers import ROOT

from layerfuse import registry
from layerfuse.bench.cases import forms_over_ranks
from layerfuse.bench.choosing import make_case
from layerfuse.bench.result import Measured, Row

sys.path.append(str(ROOT / "benchmarks"))
tables = importlib.import_module("all_reduce_tables")

PLAIN, GROUP, *_ = tables.runs()
GROUP = next(run for run in tables.runs() if run.op == tables.GROUP and run.width == PLAIN.width)
UNTUNED = next(run for run in tables.runs() if run.slack)
NAMES = {"ours": tables.OURS, "nccl": "nccl + inductor", "vllm": "vllm + layerfuse", "one": "torch one-shot alone"}


def row(tokens, **us):
    measured = [
        Measured(peer=NAMES[peer], verdict="ok", us=time, low=time, high=time, rounds=1, calls=1, error=0.0,
                 quant_error=None, message="")
        for peer, time in us.items()
    ]  # fmt: skip
    return Row(tokens=tokens, sets=8, bytes_read=1, bytes_written=1, caches=None, measured=tuple(measured))


def test_every_form_is_a_run_and_every_run_a_case():
    several = list(tables.runs(every=True))
    for run in several:
        make_case(run.op, registry=registry.default, widths=(run.width,), ranks=2)
    assert {run.op for run in several} == set(forms_over_ranks())


@pytest.mark.parametrize(
    ("run", "given", "missed"),
    [
        (PLAIN, {"tokens": 1, "ours": 7.0, "nccl": 20.0, "vllm": 9.0, "one": 7.0}, []),
        (PLAIN, {"tokens": 32, "ours": 8.0, "nccl": 20.0, "vllm": 9.0, "one": 7.0}, ["ours/best unfused 0.889 > 0.850"]),
        (PLAIN, {"tokens": 1, "ours": 7.0, "nccl": 15.0, "vllm": 9.0, "one": 7.0}, ["ours/library 0.467 > 0.450"]),
        (PLAIN, {"tokens": 1, "ours": 7.0, "nccl": 20.0, "one": 6.0}, ["ours/one-shot alone 1.167 > 1.150"]),
        (PLAIN, {"tokens": 1, "ours": 7.0, "nccl": 20.0}, ["ours/one-shot alone was not measured"]),
        (PLAIN, {"tokens": 80, "ours": 9.2, "nccl": 10.0}, ["ours/best unfused 0.920 > 0.900"]),
        (PLAIN, {"tokens": 256, "ours": 10.0, "nccl": 10.0}, []),
        (PLAIN, {"tokens": 1024, "ours": 9.6, "nccl": 10.0}, ["ours/best unfused 0.960 > 0.950"]),
        (PLAIN, {"tokens": 4096, "nccl": 10.0}, ["ours/best unfused was not measured"]),
        (UNTUNED, {"tokens": 80, "ours": 9.8, "nccl": 10.0}, []),
        (GROUP, {"tokens": 8, "ours": 7.3}, []),
        (GROUP, {"tokens": 8, "ours": 7.4}, ["ours/without quantisation 1.057 > 1.050"]),
    ],
)  # fmt: skip
def test_a_missed_goal_is_named_with_its_figure(run, given, missed):
    assert tables.misses(run, row(**given), tables.OURS, {(PLAIN.width, 8): 7.0}) == missed
