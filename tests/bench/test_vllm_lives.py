"""`vllm_lives` without vLLM: what is compared with what, and when that is right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "bench" / "scripts"


@pytest.fixture
def lives(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import vllm_lives as script

    yield script
    for name in [name for name, module in sys.modules.items() if str(SCRIPTS) in str(getattr(module, "__file__", ""))]:
        del sys.modules[name]


class Fake:
    """A process that draws the tokens of its weights, or what a fault makes of them."""

    def __init__(self, script, faults, arm, name, cache, first_seed=0, engine=None):
        self.script, self.faults, self.arm, self.name, self.cache, self.seed = (
            script,
            faults,
            arm,
            name,
            cache,
            first_seed,
        )
        self.slept = self.two = self.stopped = self.answered = False
        assert engine in (None, {"enable_sleep_mode": True})

    def answer(self, _until):
        self.answered = True
        return {"start_s": 3.0}

    def ask(self, _until, command):
        if command == "sleep_and_wake":
            assert self.turn.taken and all(each.answered for each in self.turn.begun)
            self.slept = True
            return {"before": 1, "asleep": 2, "awake": 1}
        if "fails" in self.faults and command == "beside":
            raise self.script.ArmError("no memory")
        self.two |= command == "beside"
        state = "second" if command == "beside" else "beside" if self.two else "slept" if self.slept else self.name
        weights = "other" if state in self.faults else "other" if command == "beside" or self.seed else "own"
        if state in self.faults and command == "beside":
            weights = "own"
        return {"short": [[[len(weights), each], []] for each in range(4)]}

    def stop(self):
        self.stopped = True


class Turn:
    """Among commands that run beside each other."""

    def __init__(self, begun):
        self.begun, self.taken, self.shared, self.ended = begun, False, True, False

    def take(self):
        self.taken, self.shared = True, False

    def share(self):
        self.taken, self.shared = False, True

    def end(self):
        self.taken, self.shared, self.ended = False, False, True


def found_by(lives, *faults):
    begun = []
    turn = Turn(begun)

    def begin(*args, **given):
        assert turn.shared
        begun.append(Fake(lives, faults, *args, **given))
        begun[-1].turn = turn
        return begun[-1]

    found = lives.lived(begin, 0.0, turn)
    assert all(each.stopped for each in begun) and turn.ended
    assert {each.name: each.cache for each in begun}["sleeper"] == "decode"
    return found, begun


def test_every_life_is_compared_with_the_right_one(lives):
    found, begun = found_by(lives)
    assert lives.is_right(found) and [each.name for each in begun] == ["sleeper", "other", "vllm", "warm"]
    assert found["same"].pop("as the other model, which has to differ") == (0, 4)
    assert set(found["same"].values()) == {(4, 4)} and len(found["same"]) == 5


@pytest.mark.parametrize(
    ("fault", "where"),
    [
        ("slept", "after a sleep"),
        ("warm", "from the cache"),
        ("second", "of a second engine in the process"),
        ("beside", "beside a second engine"),
    ],
)
def test_other_tokens_are_a_fault(lives, fault, where):
    found, _ = found_by(lives, fault)
    assert not lives.is_right(found) and found["same"][where] == (0, 4)


def test_what_is_not_vllms_own_is_said_alone(lives):
    found, _ = found_by(lives, "vllm")
    assert lives.is_right(found) and found["same"]["as vLLM's own, which may differ"] == (0, 4)


def test_an_engine_that_fails_is_said_and_all_processes_end(lives):
    found, _ = found_by(lives, "fails")
    assert not lives.is_right(found) and found["error"] == "no memory" and "from the cache" in found["same"]


def test_a_process_may_be_stopped_twice(lives):
    process = lives.Process.__new__(lives.Process)
    process.answers, other = os.pipe()
    process.process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    process.stop()
    process.stop()
    with pytest.raises(BrokenPipeError):
        os.write(other, b"x")
    os.close(other)


def test_a_process_is_asked_for_what_its_life_needs(lives, tmp_path, monkeypatch):
    started = []

    class Popen:
        def __init__(self, command, **given):
            started.append((json.loads(command[2]), command[1], given["env"]))

    monkeypatch.setattr("vllm_engine.subprocess.Popen", Popen)
    logs = tmp_path / "logs"
    logs.mkdir()
    lives.Process("decode", "warm", tmp_path, logs, "decode", lives.Asked(("+mla_decode",)), first_seed=7)
    lives.Process("vllm", "vllm", tmp_path, logs, "vllm", None)
    (ours, script, variables), (vllm, _, theirs) = started
    assert script.endswith("vllm_lives.py") and ours["first_seed"] == 7 and ours["batches"] == [16]
    assert ours["additional"]["layerfuse"]["fusions"] == ["+mla_decode"] and not vllm["additional"]
    assert variables["VLLM_CACHE_ROOT"].endswith("cache/decode") and theirs["VLLM_PLUGINS"] == ""
