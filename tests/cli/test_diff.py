"""`layerfuse diff` on plans as `plan --json` prints them."""


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
