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
    without = json.loads(files[0].read_text())
    del without["kinds"][0]
    files[1].write_text(json.dumps(without))
    gone = json.loads(run("diff", *files, "--json").out)
    assert gone["gone"]
    assert not gone["new"]


def test_a_file_that_is_no_plan_gets_a_clear_error(run, tmp_path) -> None:
    file = tmp_path / "deep.json"
    for text in ('{"a":' * 2_000 + "1" + "}" * 2_000, "[]", "no"):
        file.write_text(text)
        answer = run("diff", file, file)
        assert answer.code == 1
        assert answer.err.startswith(f"layerfuse: {file}")
