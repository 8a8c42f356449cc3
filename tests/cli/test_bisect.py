"""What moves a model's numbers is found: one fusion of another package, two that only together do, or nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import backend_at_hand, outside_package, run_copy
from published import CHECKPOINTS

from layerfuse import bisecting, registry
from layerfuse.bisecting import smallest
from layerfuse.cli.bisecting import without
from layerfuse.fusion import FusionConfig, FusionConfigError, Target, compile, plan  # noqa: A004
from layerfuse.registry.inspect import ConfigError
from layerfuse.testing import small_model

ADD, DUAL = "add_rms_norm", "mla_dual_rms_norm"
RUN = """
import sys, torch
torch.set_num_threads(1)
import torch._inductor.compile_fx as inductor
inductor.compile_fx_inner = lambda gm, _inputs, **_: gm
from layerfuse.cli import main
main({!r})
"""


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package whose kernel gives 1.01 times what it should."""
    return outside_package(tmp_path_factory.mktemp("outside"), 1.01)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("[1, 2, 3, 4, 5]\n\n[7, 8, 9, 10, 11]\n")
    return file


def bisected(outside: Path, *arguments: object, fusions: str) -> Any:
    code = RUN.format(["bisect", *map(str, arguments)])
    return run_copy(code, outside, LAYERFUSE_FUSIONS=fusions, CUDA_VISIBLE_DEVICES="")


def test_a_wrong_kernel_is_named_with_its_site(outside, prompts):
    answer = bisected(outside, "deepseek-v3", prompts, fusions="outside_add_rms_norm,mla_dual_rms_norm")
    assert answer.returncode == 1, answer.stdout + answer.stderr
    lines = answer.stdout.splitlines()
    assert "outside_add_rms_norm at 4 sites" in lines[0] and "mla_dual_rms_norm at 2 sites" in lines[0]
    assert any(line.startswith("outside_add_rms_norm at 2 sites: off by ") for line in lines)
    doing = [line.partition("] ")[2] for line in answer.stderr.splitlines() if line.startswith("[")]
    assert doing[:3] == ["building a small deepseek-v3", "without fusions", "with all fusions"]
    end = lines.index("found:")
    assert len(doing) == end + 2 and all(
        line.startswith("with ") for line in doing[2:]
    )  # each run has its result on stdout
    assert lines[end + 1].startswith("  outside_add_rms_norm at model")
    assert lines[end + 2].startswith("  off by ") and lines[end + 2].endswith("too far")
    assert lines[end + 3].startswith("without it: off by ") and lines[end + 3].endswith("too far")
    assert lines[end + 4].startswith(
        "what is named was found first: another run with LAYERFUSE_FUSIONS=mla_dual_rms_norm "
    )


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("", f"-{ADD}"),
        (f"{ADD}, {DUAL}", DUAL),
        (ADD, ""),
        ("all", f"{DUAL},all_reduce_add_rms_norm"),
        (f"+{ADD},-{DUAL}", f"-{DUAL},-{ADD}"),
    ],
)
def test_the_line_that_leaves_out_what_was_found_is_one_that_is_read(line: str, value: str) -> None:
    said = without(line, [ADD], [DUAL, "all_reduce_add_rms_norm"])
    assert said == value and not dict(FusionConfig.parse(said).switches).get(ADD)


def test_nothing_moves_where_fusions_are_right_and_the_model_comes_from_a_folder(outside, prompts, tmp_path):
    model = small_model(registry.model("deepseek-v3"), layers=1, hidden_size=64, heads=2)
    model.save_pretrained(tmp_path / "model")
    answer = bisected(outside, tmp_path / "model", prompts, fusions="-outside_add_rms_norm")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "near enough" in answer.stdout and answer.stdout.endswith("no fusion moves a number too far\n")
    wrong = bisected(outside, tmp_path / "model", prompts, "--greedy", fusions="outside_add_rms_norm")
    assert wrong.returncode == 0, wrong.stdout + wrong.stderr

    sites = {"final": "outside_add_rms_norm", "layers.0.self_attn:latents": "mla_dual_rms_norm"}
    rows = [{"site": site, "fusion": fusion, "outcome": "fused"} for site, fusion in sites.items()]
    rows += [{"site": "layers.0:post_attention", "fusion": "outside_add_rms_norm", "outcome": "missed"}]
    rows += [{"site": "layers.1:input", "fusion": "add_rms_norm", "outcome": "fused"}]
    file = tmp_path / "report.json"
    file.write_text(json.dumps({"layerfuse": "1", "modules": {"EngineForCausalLM.model": {"sites": rows}}}))
    named = bisected(outside, tmp_path / "model", prompts, "--report", file, fusions="")
    assert named.returncode == 1, named.stdout + named.stderr
    lines = named.stdout.splitlines()
    assert lines[0] == "EngineForCausalLM of the report is taken for DeepseekV3ForCausalLM"
    assert lines[1] == "not searched: add_rms_norm at model.layers.1:input: the model has no such site"
    assert {*lines[2].partition(": off")[0].split(", ")} == {
        f"{fusion} at {'model:' if site == 'final' else 'model.'}{site}" for site, fusion in sites.items()
    }
    assert lines[lines.index("found:") + 1] == "  outside_add_rms_norm at model:final"


def test_a_config_is_run_as_a_small_model_of_it(run, prompts, monkeypatch):
    seen: list[Any] = []
    monkeypatch.setattr(bisecting, "bisect", lambda model, *_, **__: seen.append(model))
    answer = run("bisect", CHECKPOINTS / "qwen3-4b" / "config.json", prompts, "--device", "cpu")
    assert (answer.code, answer.out) == (0, "no fusion moves a number too far\n")
    assert [type(model).__name__ for model in seen] == ["Qwen3ForCausalLM"]
    assert "building a small qwen3-4b" in answer.err
    answer = run("bisect", "nowhere/config.json", prompts)
    assert answer.code == 2 and "there is no config.json at 'nowhere/config.json'" in answer.err


@pytest.mark.parametrize(
    ("units", "culprits"),
    [
        (range(1), [{0}]),
        (range(9), [{7}]),
        (range(9), [{0, 8}]),
        (range(9), [{2, 3, 7}]),
        (range(8), [{1, 5}, {6}]),
        (range(5), [{0, 1, 2, 3, 4}]),
    ],
    ids=str,
)
def test_a_smallest_set_is_found(units: range, culprits: list[set[int]]) -> None:
    def moves(some: Any) -> bool:
        return any(each <= set(some) for each in culprits)

    found = smallest(units, moves)
    assert moves(found)
    assert not any(moves([one for one in found if one != other]) for other in found)


@pytest.mark.usefixtures("op_by_op")
def test_two_that_move_a_number_only_together(monkeypatch):
    """A kernel that is wrong where it ran before in the same call."""
    from layerfuse.fusion import backends
    from layerfuse.fusion.ops.library import declared

    model = small_model(registry.model("deepseek-v3"), layers=1, hidden_size=64, heads=2)
    seen: list[int] = []
    final = model.model.norm.weight.data_ptr()

    def kernel(x: Any, residual: Any, weight: Any, *settings: Any) -> Any:
        normed, total = declared("add_rms_norm").reference(x, residual, weight, *settings)
        seen.append(weight.data_ptr())
        wrong = seen[-1] == final and len(seen) == 2
        return (normed * 1.5 if wrong else normed), total

    kept = backends._backends["add_rms_norm"]
    monkeypatch.setitem(backends._backends, "add_rms_norm", [backend_at_hand("add_rms_norm", kernel), *kept])
    backends.decide_again()
    try:
        found = bisecting.bisect(model, [[1, 2, 3]], step=lambda _: seen.clear())
    finally:
        monkeypatch.undo()
        backends.decide_again()
    assert found is not None
    assert set(found.pairs) == {
        ("model.layers.0:post_attention", "add_rms_norm"),
        ("model:final", "add_rms_norm"),
    }
    assert not found.others.beyond and found.moved.beyond


@pytest.fixture(scope="module")
def deepseek() -> Any:
    return small_model(registry.model("deepseek-v3"), layers=2, hidden_size=64, heads=2)


@pytest.mark.parametrize(
    ("tokens", "said"), [(0, "0 other greedy tokens"), (1, "1 other greedy token"), (2, "2 other greedy tokens")]
)
def test_tokens_are_counted_in_words(tokens: int, said: str) -> None:
    moved = bisecting.Moved(relative=0.5, prompt=1, position=2, tokens=tokens, beyond=True)
    assert str(moved).endswith(f", {said}: too far")


def reported(*pairs: tuple[str, str], model: str = "", beside: tuple[str, ...] = ()) -> bisecting.Reported:
    return bisecting.Reported(model=model, sites=(*(site for site, _ in pairs), *beside), pairs=pairs)


def test_what_a_report_names_is_found_in_a_model_or_said_to_be_missing(deepseek, monkeypatch):
    expected = {
        ("model.layers.1:input", ADD): "",
        ("model.layers.1.self_attn:latents", DUAL): "",
        ("model:final", ADD): "",
        ("model.layers.0:input", ADD): "the first layer's input norm has no residual to add",
        ("model.layers.2:input", ADD): "the model has no such site",
        ("1:input", ADD): "the model has no such site",
        ("mtp.layers.0:input", ADD): "the model has no such site",
        ("vision_tower.encoder.layers.1:post_attention", ADD): "the model has no such site",
        ("input", ADD): "the model has no such site",
        ("model.layers.1:input", "another_rms_norm"): "no fusion is called that here",
        ("model.layers.1:post_attention", DUAL): "it has no place there",
    }
    monkeypatch.setenv("LAYERFUSE_FUSIONS", "")
    found = bisecting.matched(deepseek, [reported(*expected)])
    assert found.unmatched == {pair: why for pair, why in expected.items() if why}
    assert found.pairs == tuple(pair for pair, why in expected.items() if not why)
    assert found.renamed == {}
    monkeypatch.setenv("LAYERFUSE_FUSIONS", f"-{ADD}")
    found = bisecting.matched(deepseek, [reported(*expected)])
    assert found.pairs == (("model.layers.1.self_attn:latents", DUAL),)
    assert "switched off by LAYERFUSE_FUSIONS" in found.unmatched["model.layers.1:input", ADD]
    monkeypatch.setenv("LAYERFUSE_FUSIONS", "none")
    assert bisecting.matched(deepseek, [reported(*expected)]).pairs == ()


@pytest.mark.parametrize("start", ["language_model.model.", "model.language_model.", ""])
def test_layers_at_another_path_are_the_models_where_they_have_the_same_numbers(deepseek, start, monkeypatch):
    monkeypatch.setenv("LAYERFUSE_FUSIONS", "")
    inside = [("layers.1:post_attention", ADD), ("layers.0.self_attn:latents", DUAL)]
    final = f"{start[:-1]}:final".removeprefix(":") if start else "final"
    pairs = [*((start + site, fusion) for site, fusion in inside), (final, ADD)]
    tower = reported(("vision_tower.encoder.layers.2:input", ADD), beside=("vision_tower.encoder.layers.0:input",))
    found = bisecting.matched(deepseek, [tower, reported(*pairs)])
    assert found.pairs == (*((f"model.{site}", fusion) for site, fusion in inside), ("model:final", ADD))
    assert found.renamed == {start[:-1] or "the model itself": "model"}
    assert found.unmatched == {tower.pairs[0]: "the model has no such site"}


@pytest.mark.parametrize(
    ("pairs", "beside"),
    [
        ([("mtp.layers.0:post_attention", ADD)], ()),
        ([("vision_tower.encoder.layers.1:post_attention", ADD)], ()),
        ([("tower.layers.1:input", ADD)], ("tower.layers.0:input", "tower.layers.2:input")),
        ([("tower.layers.1:input", ADD)], ("tower.layers.0:input", "other:final")),
        ([("tower.blocks.1:input", ADD)], ("tower.blocks.0:input",)),
        ([("mtp:final", ADD)], ()),
    ],
)
def test_other_layers_are_not_taken_for_the_models(deepseek, pairs, beside, monkeypatch):
    monkeypatch.setenv("LAYERFUSE_FUSIONS", "")
    found = bisecting.matched(deepseek, [reported(*pairs, beside=beside)])
    assert (found.pairs, found.renamed) == ((), {})
    assert set(found.unmatched.values()) == {"the model has no such site"}


def of_engine(file: Path, **modules: Any) -> tuple[bisecting.Reported, ...]:
    """An engine's report of `Class=[(site, outcome)]`, each at `model`."""
    rows = {
        f"{name}.model": {"sites": [{"site": site, "fusion": ADD, "outcome": outcome} for site, outcome in sites]}
        for name, sites in modules.items()
    }
    file.write_text(json.dumps({"modules": rows}))
    return bisecting.reported_in(file)


def test_a_draft_is_not_taken_for_the_model(deepseek, tmp_path, monkeypatch):
    monkeypatch.setenv("LAYERFUSE_FUSIONS", "")
    site = "layers.0:post_attention"
    draft = {"EagleDeepseekV3ForCausalLM": [(site, "fused")]}
    for outcome, pairs in (("missed", ()), ("fused", ((f"model.{site}", ADD),))):
        both = of_engine(tmp_path / "report.json", DeepseekV3ForCausalLM=[(site, outcome)], **draft)
        found = bisecting.matched(deepseek, both)
        assert found.pairs == pairs and found.renamed == {}
        assert found.unmatched == {
            (f"EagleDeepseekV3ForCausalLM.model.{site}", ADD): (
                "it is of another model of the report than DeepseekV3ForCausalLM, which is searched"
            )
        }
    alone = bisecting.matched(deepseek, of_engine(tmp_path / "report.json", KimiForCausalLM=[(site, "fused")]))
    assert alone.pairs == ((f"model.{site}", ADD),)
    assert alone.renamed == {"KimiForCausalLM": "DeepseekV3ForCausalLM"}


@pytest.mark.usefixtures("op_by_op")
def test_what_did_not_run_is_named_and_nothing_at_all_is_an_error(monkeypatch):
    monkeypatch.setenv("LAYERFUSE_FUSIONS", "")
    model = small_model(registry.model("deepseek-v3"), layers=1, hidden_size=64, heads=2)
    norm = model.model.norm
    norm.forward = lambda x: x * norm.weight
    final, latents = ("model:final", ADD), ("model.layers.0.self_attn:latents", DUAL)
    said: list[str] = []
    assert bisecting.bisect(model, [[1, 2, 3]], among=[final, latents], step=said.append) is None
    assert said[0].startswith(f"{DUAL} at {latents[0]}: off by")
    assert said[1].startswith(f"not searched: {ADD} at model:final: its weight is read by ") and len(said) == 2
    with pytest.raises(bisecting.NothingRanError, match=f"{ADD} at model:final: its weight is read by "):
        bisecting.bisect(model, [[1, 2, 3]], among=[final])
    monkeypatch.setenv("LAYERFUSE_FUSIONS", "none")
    with pytest.raises(bisecting.NothingRanError, match=r"none can be searched:\n  - .*switched off"):
        bisecting.bisect(model, [[1, 2, 3]])


@pytest.mark.usefixtures("op_by_op")
def test_a_report_of_compile_names_what_is_fused(deepseek, tmp_path):
    fused = compile(deepseek, config=FusionConfig.parse(DUAL))
    with torch.no_grad():
        fused(input_ids=torch.arange(6).reshape(1, 6), use_cache=False)
    file = tmp_path / "report.json"
    file.write_text(json.dumps(fused.report.to_dict()))
    sites = {f"model.layers.{number}.self_attn:latents" for number in (0, 1)}
    (module,) = bisecting.reported_in(file)
    assert {*module.pairs} == {(site, DUAL) for site in sites}
    assert {"model:final", "model.layers.0:input", *sites} <= {*module.sites}


@pytest.mark.parametrize(
    "text",
    [
        '{"modules": []}',
        '{"modules": {"A": {"sites": [["x"]]}}}',
        '{"modules": {"A": {"sites": [{"site": 3, "fusion": "f", "outcome": "missed"}]}}}',
        '{"fusions": {"a": {"matched": [], "fallback": []}}}',
        "{}",
    ],
)
def test_a_file_that_is_no_report_is_refused(tmp_path, text):
    file = tmp_path / "report.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match="expected an engine's report"):
        bisecting.reported_in(file)


def test_a_config_holds_pairs_only() -> None:
    entry = registry.model("deepseek-v3")
    sites = [site for site, _ in entry.specs()][:1]
    assert sites
    whole = plan(entry.specs(), Target.named("cpu"))
    first = whole.expected()[0]
    some = plan(entry.specs(), Target.named("cpu"), FusionConfig(only=[(first.site, first.fusion)]))
    assert [(each.site, each.fusion) for each in some.expected()] == [(first.site, first.fusion)]
    assert any("leaves on at this site" in each.reason for each in some.refused(first.fusion))
    for wrong in ("add_rms_norm", [("site", "no_such_fusion")], [("site", 3)]):
        with pytest.raises(FusionConfigError, match=r"FusionConfig\.only: "):
            FusionConfig(only=wrong)


@pytest.mark.usefixtures("op_by_op")
@pytest.mark.parametrize(("large", "small"), [({ADD: 2.0}, {DUAL: 1.1}), ({DUAL: 4.0}, {ADD: 1.0001})], ids=[ADD, DUAL])
def test_of_several_that_move_numbers_the_largest_is_found_and_the_others_are_named(
    deepseek, large, small, monkeypatch
):
    from layerfuse.fusion import backends
    from layerfuse.fusion.ops.library import declared

    def kernel(name: str, factor: float) -> Any:
        def wrong(*given: Any) -> Any:
            first, second = declared(name).reference(*given)
            return first * factor, second

        return backend_at_hand(name, wrong)

    for name, factor in {**large, **small}.items():
        monkeypatch.setitem(backends._backends, name, [kernel(name, factor), *backends._backends[name]])
    backends.decide_again()
    try:
        found = bisecting.bisect(deepseek, [[1, 2, 3]])
    finally:
        monkeypatch.undo()
        backends.decide_again()
    assert found is not None
    assert {fusion for _, fusion in found.pairs} == {*large}
    assert [*found.apart] == [*small] and all(moved.beyond for moved in found.apart.values())
