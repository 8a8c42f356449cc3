"""What `sglang_engine`'s processes say to one another, without SGLang: a step that is held, commands for it, log probabilities."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPTS = Path(__file__).parents[2] / "bench" / "scripts"


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    yield
    for name in [name for name, module in sys.modules.items() if str(SCRIPTS) in str(getattr(module, "__file__", ""))]:
        del sys.modules[name]


@pytest.fixture
def arm(tmp_path, monkeypatch):
    from sglang_arm import Arm

    made = object.__new__(Arm)
    made.asked, made.vocabulary, made.folder = {"tp": 2}, 100, tmp_path
    made.held, made.generating, made.batch = [], None, 0
    made.waiting = socket.socket(socket.AF_UNIX)
    made.waiting.bind(str(tmp_path / "held"))
    made.waiting.listen()
    made.waiting.settimeout(0.2)
    monkeypatch.setenv("SGLANG_PROBE", str(tmp_path))
    yield made
    made.waiting.close()


def test_a_step_is_held_on_every_rank_until_it_is_let_go(arm):
    import sglang_probe

    ran, ended = [0, 0], []

    def scheduler(rank):
        def step():
            ran[rank] += 1

        for batch in (1, 2, 2, 2, 2):  # the second sequence comes late
            sglang_probe._step(SimpleNamespace(), batch, step)
        ended.append(rank)

    def generate(rows, sampling):
        assert (len(rows), len(rows[0]), sampling["max_new_tokens"]) == (2, 5, 64)
        # Two ranks are two processes, each with a count of its own.
        threads[0].start()
        while not arm.held:
            time.sleep(0.01)
        sglang_probe._seen.clear()
        threads[1].start()
        for each in threads:
            each.join()

    threads = [threading.Thread(target=scheduler, args=(rank,)) for rank in (0, 1)]
    arm._generate = generate
    arm.settle(2, 5)
    assert ran == [0, 0] and ended == []
    found = arm.replay(2, 1, 2, 3)
    assert [len(each) for each in found] == [2, 2] and ran == [7, 7] and min(map(min, found)) > 0
    with pytest.raises(RuntimeError, match="a step of 2 sequences is held, not of 8"):
        arm.replay(8, 1, 2, 3)
    with pytest.raises(RuntimeError, match="KeyError"):
        arm._ask("another")
    arm._let_go()
    assert sorted(ended) == [0, 1] and arm.held == []
    with pytest.raises(RuntimeError, match="no step is held"):
        arm.kernels(2)


def test_a_step_of_prompts_is_held_once_they_come_together(arm):
    import sglang_probe

    arm.asked["tp"], ran, asked = 1, [], []

    def generate(rows, sampling):
        assert sampling["max_new_tokens"] == 1
        asked.append(len(rows))
        # Two at once, then the others; at the second try the first one comes alone.
        for number in (2, 1) if len(asked) == 1 else (1, 3):
            batch = SimpleNamespace(
                batch_size=number,
                input_ids=[0] * number * len(rows[0]),
                forward_mode=SimpleNamespace(is_decode=lambda: False),
            )
            sglang_probe._forward(lambda *_: ran.append(len(asked)), SimpleNamespace(), batch)

    arm._generate = generate
    found = arm.prompts(3, 5, 2)
    assert asked == [3, 4] and len(found) == 2 and min(found) > 0
    assert len(arm.prompts(3, 5, 4)) == 4 and asked == [3, 4]
    assert ran == [1, 1, 2, 2, *[2] * 6]
    assert arm.prompt_calls(3, 5)[0] and ran[-5:] == [2] * 5
    arm._let_go()


def test_sequences_that_never_decode_together_are_said(arm):
    arm._generate = lambda *_: 1 / 0
    with pytest.raises(RuntimeError, match=r"8 sequences behind 5 tokens did not run together.*division by zero"):
        arm.settle(8, 5)


def test_log_probabilities_are_those_of_the_given_tokens(arm):
    from arm import PROMPTS, prompts
    from sglang_arm import _thought

    def generate(rows, sampling, **how):
        assert (sampling["max_new_tokens"], how["logprob_start_len"]) == (1, 0)
        said = []
        for row in rows:
            every = [(None if i == 0 else -i / 8, token, None) for i, token in enumerate(row)]
            best = [None if i == 0 else [(-0.5, token, None), (-1.5, 3, None)] for i, token in enumerate(row)]
            said.append({"meta_info": {"input_token_logprobs": every, "input_top_logprobs": best}})
        return said

    arm._generate = generate
    text = {name: [[7, 8, 9]] * number for name, (number, _) in PROMPTS.items()}
    found = arm.forced(text)
    number, length = PROMPTS["short"]
    assert len(found["short"]) == number
    first = found["short"][0]
    assert first["prompt"] == [-i / 8 for i in range(1, length)]
    assert first["tokens"] == [-(length + i) / 8 for i in range(3)]
    assert first["best"] == [[[token, -0.5], [3, -1.5]] for token in (7, 8, 9)]
    assert [len(each) for each in arm.one_by_one(text).values()] == [4, 4, 2]
    other = prompts(100, 1, length, 99)[0]
    said = generate([other], {"max_new_tokens": 1}, logprob_start_len=0)[0]
    with pytest.raises(RuntimeError, match="other tokens"):
        _thought(said, other[::-1], length)


def test_an_error_does_not_leave_steps_of_prompts_to_layerfuse(arm):
    from arm import PROMPTS
    from sglang_probe import FUSED

    seen = []

    def generate(*_, **__):
        seen.append((arm.folder / FUSED).exists())
        raise RuntimeError("no answer")

    arm._generate = generate
    with pytest.raises(RuntimeError, match="no answer"):
        arm.forced({name: [[7]] for name in PROMPTS})
    assert seen == [True] and not (arm.folder / FUSED).exists()


def test_the_arm_without_a_named_fusion_is_told_nothing_and_all_else_is_alike():
    import sglang_engine

    made = object.__new__(sglang_engine.Engine)
    made.report = Path("report")
    of_name = sglang_engine.STAGES["sglang"]["deepseek-v3-rank8-dense"].arms["named"].fusions
    own, default, named = (made.variables(each, Path("work")) for each in (None, ("default",), of_name))
    assert (own["SGLANG_PLUGINS"], own["LAYERFUSE_FUSIONS"]) == ("sglang_probe", "")
    assert (default["SGLANG_PLUGINS"], default["LAYERFUSE_FUSIONS"]) == ("sglang_probe,layerfuse", "")
    assert named == {**default, "LAYERFUSE_FUSIONS": "add_rms_norm,add_rms_norm_group_quant,rms_norm_group_quant"}


def test_an_arm_of_another_name_is_an_error_before_anything_starts(monkeypatch, capsys):
    import sglang_engine
    import vllm_engine

    monkeypatch.setattr(
        sys, "argv", ["sglang_engine.py", "tiny", "deepseek-v3-rank8-dense", "--arms", "sglang", "fussed"]
    )
    with pytest.raises(SystemExit):
        vllm_engine.main("", sglang_engine.Engine, sglang_engine.STAGES["sglang"])
    said = capsys.readouterr().err
    assert (
        "no arm of these stages is called 'fussed'; known: sglang, default, named, triton, flashinfer, breakable"
        in said
    )


SERVES = """
import json, os, sys, time
answers = os.fdopen(int(sys.argv[2]), "w")
report = {"modules": {"model": {"missed": []}}}
open(os.environ["LAYERFUSE_REPORT"], "w").write(json.dumps(report))
print(json.dumps({"result": "ready"}), file=answers, flush=True)
for command in map(json.loads, sys.stdin):
    if command[-1] == 2:
        time.sleep(max(0, float(os.environ["ENDS"]) - time.monotonic()))
    print(json.dumps({"result": {"seed": command[-1]}}), file=answers, flush=True)
"""


def test_a_round_that_the_limit_finds_begun_is_waited_for_and_written(monkeypatch, tmp_path):
    """The second that counts ends behind the limit; the third is not begun."""
    import sglang_serve

    (script := tmp_path / "arm.py").write_text(SERVES)
    monkeypatch.setattr(sglang_serve.Engine, "script", str(script))
    monkeypatch.setattr(sglang_serve, "WORK", tmp_path)
    monkeypatch.setenv("ENDS", str(time.monotonic() + 6))
    out, limit = tmp_path / "serve.json", ["--limit", "5", "--rounds", "4"]
    monkeypatch.setattr(sys, "argv", ["", "tiny-qwen3", *limit, "--out", str(out), "--logs", str(tmp_path / "logs")])
    sglang_serve.main()
    found = json.loads(out.read_text())["shapes"]["tiny-qwen3"]
    assert found["rounds"] == {arm: [{"seed": 1}, {"seed": 2}] for arm in ("sglang", "all")}
    assert found["fusions"]["all"] == list(
        sglang_serve.stage("sglang", ["mla"], shape="tiny-qwen3").arms["all"].fusions
    )
