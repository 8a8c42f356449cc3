"""What README.md shows is true: its code runs, its links lead somewhere, its counts are right."""

import re
import shlex
from pathlib import Path

import pytest
import torch

from layerfuse import registry, verify
from layerfuse.fusion import FUSIONS, Target, plan
from layerfuse.fusion.backends.aiter import RELEASES
from layerfuse.fusion.formats import FORMATS
from layerfuse.testing import small_entry, small_model

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.mark.usefixtures("op_by_op")
def test_the_tour_runs_and_says_what_its_comments_say(capsys):
    (tour,) = blocks("python")
    model = small_model(registry.model("deepseek-v3"), layers=2)
    names = {"model": model, "layer": model.model.layers[0].self_attn, "input_ids": torch.ones(1, 3, dtype=torch.int64)}
    exec(tour, names)
    out = capsys.readouterr().out
    assert "61 x expected" in out
    assert "mla_dual_rms_norm: 2 expected, 2 matched" in out
    assert "mla_dual_rms_norm: expected at 2 sites, 2 by the profiler, 2 by the counters" in out
    assert registry.spec_for(names["layer"]).split_sizes == (1536, 512, 64)


def test_the_toml_checks(run, tmp_path):
    (table,) = blocks("toml")
    file = tmp_path / "my.toml"
    entry = run("inspect", ROOT / "tests/engines/checkpoints/qwen3-next-80b-a3b", "--name", "my-model").out
    file.write_text(f"{entry}\n{table}", encoding="utf-8")
    assert run("check", file).out == "1 model, 1 layer class: all fine\n"


def test_the_commands_exist(run):
    lines = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("layerfuse ")]
    assert len(lines) >= 5
    for line in lines:
        name = shlex.split(line, comments=True)[1]
        assert run(name, "--help").code == 0
    assert run(*shlex.split(lines[0], comments=True)[1:]).code == 0


def test_the_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    said = {line.split()[1] for block in blocks("sh") for line in block.splitlines() if line.startswith("make ")}
    assert said
    assert said <= targets


def test_links_lead_somewhere():
    targets = re.findall(r"\]\(([^)#]+)", README)
    assert targets
    assert [target for target in targets if not target.startswith("http") and not (ROOT / target).exists()] == []


def numbers(pattern):
    """Every number that the README gives in such words; at least one."""
    found = {int(number) for number in re.findall(pattern, README)}
    assert found, pattern
    return found


def expected_by_verify():
    """What `layerfuse verify` expects to be fused, by model."""
    found = {}
    for name in verify.FOUR:
        few = verify.one_of_each(registry.model(name))
        small = small_entry(few, layers=few.num_hidden_layers)
        found[name] = plan(small.specs(engine="transformers"), Target.named("cpu"))
    return found


def test_counts_are_those_of_the_code():
    own = [name for name, fusion in FUSIONS.items() if fusion.owner == "layerfuse"]
    rows = re.findall(r"^\| \[`(\w+)`\].* \| ([^|]+) \|$", README, re.MULTILINE)
    assert numbers(r"There are (\d+) chains") == {len(rows)}
    schemes = ", ".join(form.scheme for form in FORMATS.values())
    several = [(chain, forms.replace("every format", schemes)) for chain, forms in rows]
    forms = [(chain, form.replace(" ", "_")) for chain, said in several for form in said.split(", ")]
    assert sorted(chain if form == "alone" else f"{chain}_{form}_quant" for chain, form in forms) == sorted(own)
    assert numbers(r"(\d+) models are declared") == {len(registry.models())}
    assert numbers(r"(\d+) releases") == {len(RELEASES)}


def test_counts_of_the_transcript_are_those_of_the_plan():
    plans = expected_by_verify()
    assert numbers(r"(\d+) of \d+ models verified") == numbers(r"\d+ of (\d+) models verified") == {len(plans)}
    total = {sum(len(made.expected()) for made in plans.values())}
    assert numbers(r"(\d+) of \d+ expected fusions") == numbers(r"of (\d+) expected fusions") == total
    model = re.search(r"```text\n([\w.-]+): verified", README)[1]
    for fusion, expected, refused, not_applicable in re.findall(
        r"fusion +(\w+): (\d+) expected, \d+ matched, (\d+) refused, (\d+) not applicable", README
    ):
        kinds = (plans[model].expected(fusion), plans[model].refused(fusion), plans[model].not_applicable(fusion))
        assert (int(expected), int(refused), int(not_applicable)) == tuple(map(len, kinds)), fusion
