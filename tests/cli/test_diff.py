"""`layerfuse diff` on plans as `plan --json` prints them."""

import json


def test_what_another_size_changes_in_a_plan_is_said_by_its_place(run, tmp_path) -> None:
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    for file, tp in zip(files, (1, 2), strict=True):
        file.write_text(run("plan", "qwen3-8b", "--tp", tp, "--json").out)
    same = run("diff", files[0], files[0])
    assert (same.code, same.out) == (0, "0 new, 0 gone, 0 changed\n")
    answer = run("diff", *files, "--json")
    said = json.loads(answer.out)
    assert answer.code == 1
    assert said["changed"]["tp"] == [1, 2]
    assert any("all_reduce" in place and place.endswith(".decision") for place in said["changed"])
    assert "changed  tp: 1 -> 2" in run("diff", *files).out
    why = [place.endswith(".reason") for place in said["changed"]]
    assert why == sorted(why), "a decision comes before its reasons"
    without = json.loads(files[0].read_text())
    del without["kinds"][0]
    files[1].write_text(json.dumps(without))
    gone = json.loads(run("diff", *files, "--json").out)
    assert gone["gone"]
    assert not gone["new"]


def test_a_file_that_is_no_plan_gets_a_clear_error(run, tmp_path) -> None:
    file = tmp_path / "deep.json"
    for text in (
        '{"a":' * 2_000 + "1" + "}" * 2_000,
        '{"model": "a", "target": {}, "kinds":' + '{"a":' * 2_000 + "1" + "}" * 2_001,
        "[]",
        "no",
    ):
        file.write_text(text)
        answer = run("diff", file, file)
        assert answer.code == 1
        assert answer.err.startswith(f"layerfuse: {file}")


def test_an_object_of_another_kind_is_refused_with_what_was_expected(run, tmp_path) -> None:
    plan, specs, other = (tmp_path / name for name in ("plan.json", "specs.json", "other.json"))
    plan.write_text(run("plan", "qwen3-8b", "--json").out)
    specs.write_text(run("specs", "qwen3-8b", "--json").out)
    for text, got in (('{"a": 1, "b": 2}', "an object with the keys 'a', 'b'"), ("{}", "an object with no keys")):
        other.write_text(text)
        for files in ((plan, other), (other, plan)):
            answer = run("diff", *files)
            assert (answer.code, answer.out) == (1, "")
            assert answer.err.startswith(f"layerfuse: {other}: expected a plan (plan --json); or ")
            assert answer.err.endswith(f"got {got}\n")
    answer = run("diff", plan, specs)
    assert answer.code == 1
    assert answer.err == f"layerfuse: {specs}: expected a plan (plan --json), as {plan} is, got specs (specs --json)\n"
    assert run("diff", specs, specs).out == "0 new, 0 gone, 0 changed\n"


def test_reports_of_engines_and_of_compile_are_compared(run, tmp_path) -> None:
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    for report in ({"layerfuse": "0.2.0", "pid": 1, "modules": {}}, {"target": {}, "fusions": {}, "records": []}):
        one.write_text(json.dumps(report))
        two.write_text(json.dumps({**report, "extra": 1}))
        assert run("diff", one, two).out == "new      extra: 1\n1 new, 0 gone, 0 changed\n"
