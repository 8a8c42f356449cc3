"""Fused all-reduces measured over real processes: right on every rank or no time, and no rank that waits for ever."""

import json
import time

import pytest
import rank_peers
from bench_support import OURS
from helpers import in_turn

from layerfuse import bench
from layerfuse.bench import ranks as ranks_module
from layerfuse.bench import report
from layerfuse.bench.cases import forms_over_ranks
from layerfuse.bench.result import Result

FORM = "all_reduce_add_rms_norm"
PEERS = (OURS, "gloo + layerfuse", "gloo alone", "copy")


@pytest.fixture(scope="module")
def ranks():
    with bench.Ranks(2, "cpu") as started:
        started.call(rank_peers.add_peers)
        yield started


@pytest.fixture
def measure(ranks):
    def run(form=FORM, peers=PEERS, **given):
        return bench.run(form, peers=peers, ranks=ranks, **{"widths": [256], "tokens": [1, 5], "quick": True, **given})

    return run


@pytest.mark.parametrize(
    ("form", "options"), in_turn(sorted(forms_over_ranks()), [{}, {"dtype": "fp16", "weight_offset": 1.0}])
)
def test_every_form_is_right_and_gets_a_time(measure, form, options):
    result = measure(form, **options)
    assert result.ours == OURS
    assert result.case.ranks == 2
    assert "-2-ranks-" in result.slug
    assert "over 2 ranks" in report.heading(result)
    for row in result.rows:
        assert {one.peer: one.verdict for one in row.measured} == dict.fromkeys(PEERS, "ok"), row
        assert all(one.us > 0 for one in row.measured)
        assert row.of(OURS).message == ""  # it rounds no sum
    assert Result.from_dict(json.loads(json.dumps(result.to_dict(), allow_nan=False))) == result


def test_ours_is_held_against_the_best_unfused_way(measure):
    result = measure()
    row, table = result.rows[0], report.tables(result)[2]
    assert table.head[:2] == ("tokens", "best unfused")
    ours, best = row.us(OURS), row.us("gloo + layerfuse")
    assert table.rows[0] == ("1", f"{ours / best:.2f}", f"{ours / best:.2f}", "", "gloo + layerfuse")


def test_float32_is_no_rounding_of_the_sum_where_much_cancels(measure):
    """At this size an element is left with so little that float32's additions show in its bfloat16."""
    (row,) = measure(peers=[OURS], tokens=[64], widths=[7168]).rows
    assert (row.of(OURS).verdict, row.of(OURS).message) == ("ok", "")


def test_only_what_is_measured_is_announced_and_shown(measure):
    steps = []
    result = measure(peers=[OURS], step=lambda *step: steps.append(step))
    assert steps == [(f"{count}: {what}", 4) for count in ("1 token", "5 tokens") for what in (OURS, "timing")]
    assert [table.title for table in report.tables(result)] == ["Microseconds per call"]


def test_a_library_that_rounds_its_sum_is_right_and_says_so(measure):
    result = measure(peers=["gloo + layerfuse"], tokens=[64])
    (said,) = [line for line in report.remarks(result) if "may be rounded" in line]
    assert said.startswith("gloo + layerfuse at 64 tokens: right where the sum over ranks may be rounded")


WRONG = {
    "wrong": ("wrong", "rank 1: a norm is off by"),
    "raises": ("failed", "rank 1: ZeroDivisionError: no good"),
    "refuses": ("refused", "one token at most"),
    "layerfuse (nudged)": ("wrong", "rank 1: its bits differ from those of the first rank"),
    "sum off": ("wrong", "a sum over ranks is off by"),
}


def test_what_is_wrong_on_one_rank_gets_no_time_and_stops_nobody_else(measure):
    (row,) = measure(peers=[*WRONG, "sum", "copy"], tokens=[5]).rows
    for peer, (verdict, said) in WRONG.items():
        found = row.of(peer)
        assert (found.verdict, found.us) == (verdict, None)
        assert said in found.message
    assert row.of("sum").verdict == "ok"
    assert row.us("copy") is not None


def test_parts_differ_between_ranks_and_residuals_do_not(ranks):
    (mine, residual), (other, same) = ranks.call(rank_peers.first_row)
    assert mine != other
    assert residual == same


def test_the_slowest_rank_counts(ranks):
    assert ranks.call(rank_peers.slowest) == [{"a": [2.0, 5.0]}] * 2


def test_what_fails_on_one_rank_is_an_error_on_all(ranks):
    with pytest.raises(bench.RankError, match=r"^rank 1: ZeroDivisionError: "):
        ranks.call(rank_peers.together)
    assert ranks.alive


def test_a_wrong_question_is_that_error_and_ends_nothing(measure, ranks):
    with pytest.raises(bench.UnknownPeerError, match="no peer is called 'gloo on'"):
        measure(peers=["gloo on"])
    with pytest.raises(
        bench.CannotMeasureError, match="torch one-shot alone: symmetric memory is for GPUs, not for cpu"
    ):
        measure(peers=["torch one-shot alone"])
    with pytest.raises(bench.BenchError, match="these ranks are on cpu, and device is cuda"):
        measure(device="cuda")
    assert ranks.alive


def test_multicast_stays_off(ranks):
    assert ranks.call(rank_peers.variables) == [["1", "0"]] * 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"fusion": "add_rms_norm", "ranks": 2}, "add_rms_norm runs on one rank"),
        ({"fusion": FORM, "ranks": 1}, "on 2 or more ranks, got 1"),
        (
            {"fusion": FORM, "ranks": 2, "device": "cuda"},
            "2 are asked for, and torch finds 0; device cpu takes processes",
        ),
        (
            {"fusion": FORM, "device": "cuda"},
            "on 2 or more GPUs, one rank each, and torch finds 0; device cpu takes processes",
        ),
        ({"fusion": FORM, "device": "tpu"}, "device must be cuda or cpu, got 'tpu'"),
    ],
)
def test_ranks_that_cannot_be_are_refused(given, said, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(bench.BenchError, match=said):
        bench.run(**{"device": "cpu", **given})


def test_an_unknown_peer_is_refused_before_any_process_starts():
    ranks = bench.Ranks(2, "cpu")
    for given in (2, ranks):
        with pytest.raises(bench.UnknownPeerError, match="'gloo on'; did you mean 'gloo alone'") as error:
            bench.run(FORM, widths=[256], peers=["gloo on"], device="cpu", ranks=given)
        assert {"layerfuse", OURS, "flashinfer fused", "gloo + inductor", "copy"} < set(error.value.known)
        assert error.traceback[-1].name == "check_names"  # raised here, not told by a rank
    assert not ranks.started


def test_peers_of_started_ranks_are_theirs_to_know(measure):
    assert measure(peers=["sum"], tokens=[1]).present == ("sum",)


def test_a_rank_that_dies_ends_all_with_what_is_known():
    begun = time.monotonic()
    with bench.Ranks(2, "cpu") as started:
        started.call(rank_peers.add_peers)
        with pytest.raises(bench.RankError, match="rank 1 of 2, 1 token: dies: it died with exit code 3"):
            bench.run(FORM, widths=[256], tokens=[1], peers=["dies"], ranks=started)
        assert not started.alive
        with pytest.raises(bench.RankError, match="these ranks have ended"):
            started.call(rank_peers.slowest)
    assert time.monotonic() - begun < 60


def test_who_waits_for_a_rank_says_for_which_and_how_long():
    with (
        bench.Ranks(2, "cpu") as started,
        pytest.raises(bench.RankError, match="rank 1 has not come here for 1 s; rank 0 says 'here'"),
    ):
        started.call(rank_peers.waits_for_the_second, 1)


def test_ranks_that_nobody_entered_start_with_their_first_call_and_one_that_falls_silent_ends_all(monkeypatch):
    started = bench.Ranks(2, "cpu")
    try:
        assert not started.alive
        assert started.call(rank_peers.sleeps, 0) == [0, 1]
        assert started.alive
        monkeypatch.setattr(ranks_module, "SILENCE", 0.5)
        with pytest.raises(bench.RankError, match="rank 1 of 2, working: nothing was heard for 0 s; ended"):
            started.call(rank_peers.sleeps, 100)
        assert not started.alive
    finally:
        started.close()
