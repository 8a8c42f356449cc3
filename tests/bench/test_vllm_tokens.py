"""bench/scripts/vllm_tokens.py: how far log probabilities are apart, and where an arm is further from vLLM than its own ways are."""

import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "bench" / "scripts"


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))


def text(off=0.0, once=0.0, best=((7, -1.0), (8, -1.03125))):
    return {
        "prompt": [-3.0 + off, -4.0 - off],
        "tokens": [-1.0 + off, -2.0 - off, -1.5 + off + once],
        "best": [[list(each) for each in best]] * 3,
    }


def test_distances_are_those_of_the_same_tokens():
    from vllm_tokens import distances

    found = distances({"a": [text(), text()], "b": [text()]}, {"a": [text(0.5)], "b": [text(0.25, once=1.0)]})
    assert found["texts"] == 2, "texts that the other lacks were not left out"
    assert found["prompt"] == {"mean": 0.375, "mean's error": 0.125, "largest": 0.5, "of": 4}
    assert found["tokens"]["largest"] == 1.25
    assert found["other best token"] == 0


@pytest.mark.parametrize(
    ("second", "beyond"), [((8, -1.03125), 0), ((8, -1.125), 3), ((9, -1.03125), 3)], ids=["a tie", "apart", "unknown"]
)
def test_another_best_token_is_beyond_a_tie_or_not(second, beyond):
    from vllm_tokens import distances

    found = distances({"a": [text(best=((7, -1.0), second))]}, {"a": [text(best=((8, -1.0), (7, -1.03125)))]})
    assert (found["other best token"], found["other beyond a tie"]) == (3, beyond)


def test_vllms_own_ways_bound_an_arm():
    from vllm_tokens import distances, exceeds

    def of(*how, **more):
        return distances({"a": [text()]}, {"a": [text(*how, **more)]})

    ways = {"unfused": of(0.01), "other batches": of(0.002)}
    assert exceeds(of(0.0124), ways) == []
    assert exceeds(of(0.0126), ways) == [
        "prompt: mean 0.01260 is above 0.01250",
        "tokens: mean 0.01260 is above 0.01250",
    ]
    assert exceeds(of(0.0, once=0.07), ways)[-1] == "tokens: largest 0.07000 is above 0.06250"
    assert exceeds(of(0.0009), {"unfused": of(0.0)}) == []
    assert exceeds(of(0.0011), {"unfused": of(0.0)}) != []
    assert exceeds(of(float("nan")), ways) != [], "what is not a number is within every bound"


def test_prompts_are_timed_in_turns_and_one_that_fails_takes_no_further_part():
    from vllm_engine import ArmError, _time_prompts
    from vllm_table import table

    class Fake:
        def __init__(self, *answers):
            self.answers, self.stopped = list(answers), False

        def ask(self, until, command, number, length, *rounds):
            assert (number, length) == (2, 64)
            if command == "prompt_kernels":
                return [{"one": [3, 500.0], "other": [1, 20.0]}]
            assert rounds == ((5,) if len(self.answers) == 3 else (9,))
            answer = self.answers.pop(0)
            if answer is None:
                raise ArmError("gone")
            return answer

        def stop(self):
            self.stopped = True

    last = Fake([9.0], [1.0, 1.0], None)
    engines = {
        "vllm": Fake([9.0, 20.0], [60.0, 5.0], [4.0, 7.0, 5.0]),
        "decode": Fake([8.0], [30.0, 4.0, 2.0], [90.0, 4.0]),
        "last": last,
    }
    result = {"arms": {name: {"fusions": None} for name in engines}, "errors": {}}
    _time_prompts(result, engines, 2, 64, 0.0, 2)
    found = result["arms"]["decode"]["prompts 2 x 64"]
    assert found == {
        "ms": 3.5,
        "turns_ms": [3.0, 4.0],
        "times_faster": 1.5833,
        "times_faster_95": None,
        "more_ms": -2.0,
        "more_ms_95": None,
        "gpu_ms": 0.52,
        "launches": 4.0,
    }
    assert last.stopped and list(result["errors"]) == ["last"] and set(engines) == {"vllm", "decode"}
    assert "prompts 2 x 64: 3.50 ms (1.583), gpu 0.52 |" in table({"stages": {"a stage": result}}, (1,))
    found |= {"times_faster_95": [1.5, 1.75], "calls": 70}
    assert "3.50 ms (1.583, 1.500 to 1.750), gpu 0.52, 70 calls |" in table({"stages": {"a stage": result}}, (1,))


def test_an_interval_holds_the_median_19_times_of_20():
    from vllm_engine import _interval

    assert _interval([1.0] * 5) is None, "five values lie on one side of the median once in 16 times"
    assert _interval([3.0, 1.0, 2.0, 6.0, 5.0, 4.0]) == [1.0, 6.0]
    assert _interval([float(each) for each in range(40)]) == [13.0, 26.0]  # as tables of the sign test have it
    chance = random.Random(0)
    intervals = [_interval([chance.gauss(0.0, 1.0) for _ in range(20)]) for _ in range(1000)]
    assert 940 < sum(low <= 0.0 <= high for low, high in intervals) < 980


def test_calls_are_told_by_what_the_first_arm_does_less_often():
    from vllm_engine import _count_calls

    class Fake:
        def __init__(self, **calls):
            self.calls = calls

        def ask(self, *_):
            return [self.calls, {}]

    result = {"arms": {arm: {"prompts 1 x 8": {"ms": 1.0}} for arm in ("vllm", "ours")}, "errors": {}}
    _count_calls(
        result, {"vllm": Fake(a=[3.0, 9.0], b=[1.0, 2.0]), "ours": Fake(a=[3.0, 8.0], c=[7.25, 1.5])}, 1, 8, 0.0
    )
    assert [result["arms"][arm]["prompts 1 x 8"] for arm in ("vllm", "ours")] == [
        {"ms": 1.0, "calls": 4, "more_calls": {}},
        {"ms": 1.0, "calls": 10, "more_calls": {"b": [-1.0, -2.0], "c": [7.2, 1.5]}},
    ]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads are bound to cores on Linux alone")
def test_while_prompts_are_timed_all_arms_have_the_same_cores():
    """The engine's own thread is the only one of its arm on its core, and afterwards every thread is where it was."""
    from vllm_engine import Engine, _on_cores

    allowed = os.sched_getaffinity(0)
    asleep = "import sys, threading; threading.Thread(target=sys.stdin.read).start(); print(flush=True)"
    begun = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {asleep!r}])"
    engines = {}
    for name in ("one", "two"):
        engine = engines[name] = Engine.__new__(Engine)
        engine.process = subprocess.Popen(
            [sys.executable, "-c", begun], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
    try:
        for engine in engines.values():
            engine.process.stdout.readline()
            threads = engine.threads()
            assert threads[0] == engine.process.pid and len(threads) == 3
        with _on_cores(engines, 2) as cores:
            assert cores == sorted(allowed)[-2:]
            for engine in engines.values():
                first, *others = map(os.sched_getaffinity, engine.threads())
                assert first == set(cores[:1]) and others == [set(cores[1:]) or first] * 2
        with _on_cores(engines, 0) as cores:
            assert cores == []
            assert all(
                os.sched_getaffinity(each) == allowed for engine in engines.values() for each in engine.threads()
            )
    finally:
        for engine in engines.values():
            engine.process.stdin.close()
            engine.process.stdout.close()
            engine.process.wait(10)


def test_a_whole_model_is_the_sum_of_its_layers():
    from vllm_table import table

    def stage(layers, **us):
        arms = {
            arm: {"fusions": ["default"] if arm == "ours" else None, "batch 1": {"us": each, "times_faster": 1.0}}
            for arm, each in us.items()
        }
        return {"layers": layers, "arms": arms, "errors": {}}

    dense, mixture = "deepseek-v3-rank8-dense", "deepseek-v3-rank8-mixture"
    stages = {
        dense: stage(6, vllm=600.0, other=540.0, ours=480.0),
        mixture: stage(3, vllm=600.0, other=660.0, ours=570.0),
    }
    said = table({"stages": stages}, (1, 8)).splitlines()
    # 3 x 100 + 58 x 200, 3 x 90 + 58 x 220, 3 x 80 + 58 x 190
    assert "| DeepSeek-V3 in fp8, a rank of eight | vllm | 11.90 ms (1.000, 1.000) | - |" in said
    assert "| DeepSeek-V3 in fp8, a rank of eight | other | 13.03 ms (0.913, 0.913) | - |" in said
    assert "| DeepSeek-V3 in fp8, a rank of eight | ours | 11.26 ms (1.057, 1.057) | - |" in said
    for each in stages.values():
        del each["arms"]["vllm"]  # where only some arms were asked for
    assert "| DeepSeek-V3 in fp8, a rank of eight | ours | - | - |" in table({"stages": stages}, (1, 8)).splitlines()
    del stages[mixture]
    assert not [line for line in table({"stages": stages}, (1,)).splitlines() if "a rank of eight" in line]


def test_arms_are_asked_at_once_and_one_that_fails_takes_no_further_part():
    from vllm_engine import CONTEXT, ArmError, _all_at_once

    order = []

    class Fake:
        def __init__(self, name, fails=None):
            self.name, self.fails = name, fails

        def tell(self, *command):
            order.append((self.name, command))
            if self.fails == "told":
                raise BrokenPipeError

        def answer(self, _until):
            order.append((self.name, "answer"))
            if self.fails:
                raise ArmError(f"{self.name}: its process has ended")
            return f"{self.name} said"

        def stop(self):
            order.append((self.name, "stop"))

    engines = {"one": Fake("one"), "two": Fake("two", "told"), "three": Fake("three", "asked")}
    result = {"arms": {"one": {}}, "errors": {}}
    assert _all_at_once(result, engines, 0.0, "tokens") == {"one": "one said", "two": None, "three": None}
    assert result["arms"]["one"] == {"tokens": "one said"}
    order.clear()
    engines |= {"two": Fake("two", "told"), "three": Fake("three", "asked")}
    _all_at_once(result, engines, 0.0, "settle", 8, CONTEXT)
    assert order[:3] == [(name, ("settle", 8, CONTEXT)) for name in ("one", "two", "three")], "all at once"
    assert list(engines) == ["one"] and list(result["errors"]) == ["two", "three"]
    assert ("two", "stop") in order and ("three", "stop") in order


def test_one_command_is_timed_while_others_wait(tmp_path, monkeypatch):
    from vllm_engine import _Turn

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    order = []
    first, second = _Turn(), _Turn()  # both start

    def other():
        second.take()
        order.append("second")
        second.end()

    waiting = threading.Thread(target=other)
    waiting.start()
    waiting.join(0.2)
    assert not order, "the first still starts"
    late = threading.Thread(target=lambda: (_Turn().end(), order.append("late")))
    first.end()
    waiting.join(10)
    assert order == ["second"]
    timed = _Turn()
    timed.take()
    assert second.waited > 0.1 and timed.waited < second.waited
    late.start()
    late.join(0.2)
    assert order == ["second"], "what starts waits while another is timed"
    timed.end()
    late.join(10)
    assert order == ["second", "late"]


def test_a_model_is_written_as_a_whole_beside_engines_that_read_it(tmp_path):
    """Another command may begin with the same shape while an engine of the first loads it."""
    from vllm_shapes import folder_of

    folder = folder_of("tiny", tmp_path)
    names = {"config.json", "tokenizer.json", "tokenizer_config.json"}
    reading = {name: (folder / name).open() for name in names}
    for name, file in reading.items():
        file.seek(0)
        assert os.fstat(file.fileno()).st_nlink == 1, name
    assert folder_of("tiny", tmp_path) == folder
    for name, file in reading.items():
        with file:
            assert os.fstat(file.fileno()).st_nlink == 0, f"{name} was written to while it was read"
    assert {each.name for each in folder.iterdir()} == names
